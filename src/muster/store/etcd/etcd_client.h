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
  std::string user, password;  ///< no user: no login

  std::string name() const;  ///< for messages: "etcd at a:2379, b:2379"
};

/// A key, or those from `key` to before `end`.
struct EtcdRange {
  std::string key, end{};
};
/// All keys that begin so. `prefix` ends with a character, not with 0xff.
EtcdRange keys_below(std::string prefix);

/// What etcd says of one key; `found` false when there is none.
struct EtcdKey {
  bool found = false;
  std::string key;
  Bytes value;
  int64_t changed = 0;  ///< the revision of its last change
};

/// The parts of a transaction (etcd's API reference, etcdserverpb): JSON as its gateway reads it.
namespace etcd {
using Json = nlohmann::json;
Json range(const EtcdRange& range, Json options = Json::object());
Json put(const std::string& key, ByteView value, int64_t lease = 0);
Json remove(const EtcdRange& range);
/// `key` was last changed at `revision`; 0: there is none.
Json unchanged(const std::string& key, int64_t revision);
/// No key of the range is there.
Json empty(const EtcdRange& range);
Json holds(const std::string& key, ByteView value);
Json transaction(std::vector<Json> compare, std::vector<Json> success, std::vector<Json> failure = {});

/// Of answers, which nobody vouches for: what is missing or of another type is 0 or empty.
int64_t number(const Json& object, const char* name);
std::string text(const Json& object, const char* name);
const Json& part(const Json& object, const char* name);
/// The keys that a range found.
std::vector<EtcdKey> keys_of(const Json& answer);
EtcdKey key_of(const Json& answer);
/// The answer to the nth operation of a transaction that was of `kind`: "response_range", ...
const Json& response(const Json& answer, size_t index, const char* kind);
int64_t revision(const Json& answer);
}  // namespace etcd

/// Calls of etcd's version 3 API by its JSON gateway. Of several endpoints the one that answered last is asked first.
/// Thread-safe.
class EtcdClient {
 public:
  /// Unless an endpoint answers now: kUnavailable, or kAuthentication when it refuses.
  static Result<std::shared_ptr<EtcdClient>> connect(EtcdTarget target, const Deadline& deadline);

  /// `body` to "/v3/<path>". What only reads is asked of the next endpoint too when one breaks off in the middle; what
  /// may have changed something is kPeerLost then.
  enum class Kind { kReads, kChanges };
  Result<etcd::Json> call(const char* path, const etcd::Json& body, Kind kind, const Deadline& deadline);
  /// Returns once something in one of the ranges changed after `revision`, or at the deadline.
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
  std::mutex mutex_;
  std::vector<std::unique_ptr<Http>> idle_;
  std::string token_;
  size_t preferred_ = 0;  // the endpoint that answered last
};

}  // namespace muster
