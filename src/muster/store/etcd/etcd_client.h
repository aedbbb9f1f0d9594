#pragma once

#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/clock.h"
#include "muster/io/address.h"
#include "muster/store/etcd/etcd_http.h"

namespace muster {

struct EtcdTarget {
  std::vector<HostPort> hosts;
  bool https = false;
  HttpFiles files;
  std::string user, password;  ///< an empty user means no login

  std::string name() const;  ///< for messages: "etcd at a:2379, b:2379"
};

/// One key if `end` is empty. Otherwise all keys from `key` up to, but not including, `end`.
struct EtcdRange {
  std::string key, end{};
};
/// All keys with this prefix, which must not end with the byte 0xff.
EtcdRange keys_below(std::string prefix);

/// A key in etcd. `found` is false if the key does not exist.
struct EtcdKey {
  bool found = false;
  std::string key;
  Bytes value;
  int64_t changed = 0;  ///< the revision of its last change
};

/// The parts of a transaction as JSON for etcd's gateway (etcd's API reference, etcdserverpb).
namespace etcd {
using Json = nlohmann::json;
Json range(const EtcdRange& range, Json options = Json::object());
Json put(const std::string& key, ByteView value, int64_t lease = 0);
Json remove(const EtcdRange& range);
/// Condition: the last change of `key` was at `revision`. Revision 0 means that the key does not exist.
Json unchanged(const std::string& key, int64_t revision);
/// Condition: no key of the range exists.
Json empty(const EtcdRange& range);
/// Condition: the key has this value.
Json holds(const std::string& key, ByteView value);

/// These functions read answers, which may be malformed. A part that is missing or has another type reads as 0 or
/// empty.
int64_t number(const Json& object, const char* name);
std::string text(const Json& object, const char* name);
const Json& part(const Json& object, const char* name);
/// True if all conditions of a transaction held. The gateway omits false values.
bool succeeded(const Json& answer);
/// The keys that a range found.
std::vector<EtcdKey> keys_of(const Json& answer);
EtcdKey key_of(const Json& answer);
/// The answer to operation `index` of a transaction. `kind` is "response_range", "response_put" and so on.
const Json& response(const Json& answer, size_t index, const char* kind);
int64_t revision(const Json& answer);
}  // namespace etcd

/// Calls etcd's version 3 API through its JSON gateway. Tries the endpoint that answered last before the other
/// endpoints. Thread-safe.
class EtcdClient {
 public:
  /// kUnavailable if no endpoint answers, kAuthentication if it refuses the login.
  static Result<std::shared_ptr<EtcdClient>> connect(EtcdTarget target, const Deadline& deadline);

  /// Posts `body` to "/v3/<path>". If an endpoint fails during the request, a read is repeated at the next endpoint. A
  /// change fails with kPeerLost, because the endpoint may have carried it out.
  enum class Kind { kReads, kChanges };
  Result<etcd::Json> call(const char* path, const etcd::Json& body, Kind kind, const Deadline& deadline);
  /// Returns once a key of the ranges has changed after `revision`, or at the deadline.
  Result<> watch(const std::vector<EtcdRange>& ranges, int64_t revision, const Deadline& deadline);

  const EtcdTarget& target() const { return target_; }

 private:
  explicit EtcdClient(EtcdTarget target) : target_(std::move(target)) {}
  Result<std::unique_ptr<Http>> take();
  void give_back(std::unique_ptr<Http> http);
  Result<> log_in(const Deadline& deadline);
  Result<Http::Answer> post(const char* path, const std::string& body, Kind kind, const Deadline& deadline,
                            const Http::OnLine& on_line = {});
  Error refusal(const Http::Answer& answer) const;

  const EtcdTarget target_;
  std::mutex mutex_;  // guards all members below; not held during requests
  std::vector<std::unique_ptr<Http>> idle_;
  std::string token_;
  size_t preferred_ = 0;  // the endpoint that answered last
};

}  // namespace muster
