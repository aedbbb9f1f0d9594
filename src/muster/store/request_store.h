#pragma once

#include <string>

#include "muster/store/state/state.h"
#include "muster/store/store.h"

namespace muster {

/// Every operation of Store in terms of one: send a Request, wait for its Reply. Thread-safe if call() is.
class RequestStore : public Store {
 public:
  Result<> set(const Key& key, ByteView value, const Deadline& deadline) override;
  Result<Bytes> get(const Key& key, const Deadline& deadline) override;
  Result<Bytes> compare_set(const Key& key, ByteView expected, ByteView desired, const Deadline& deadline) override;
  Result<int64_t> add(const Key& key, int64_t amount, const Deadline& deadline) override;
  Result<bool> check(const std::vector<Key>& keys, const Deadline& deadline) override;
  Result<> wait(const std::vector<Key>& keys, const Deadline& deadline) override;
  Result<bool> delete_key(const Key& key, const Deadline& deadline) override;
  Result<int64_t> num_keys(const Deadline& deadline) override;
  Result<> append(const Key& key, ByteView value, const Deadline& deadline) override;
  Result<std::vector<Bytes>> multi_get(const std::vector<Key>& keys, const Deadline& deadline) override;
  Result<> multi_set(const std::vector<Key>& keys, const std::vector<Bytes>& values, const Deadline& deadline) override;
  Result<> queue_push(const Key& key, ByteView value, const Deadline& deadline) override;
  Result<Bytes> queue_pop(const Key& key, const Deadline& deadline) override;
  Result<int64_t> queue_length(const Key& key, const Deadline& deadline) override;
  Result<std::vector<Key>> list_keys(std::string_view prefix, const Deadline& deadline) override;
  Result<> barrier(const Key& key, int64_t count, const Deadline& deadline) override;
  Result<StoreStat> stat(const Deadline& deadline) override;

 protected:
  /// The reply, its status already looked at. `request.id` is for the implementation to fill in.
  virtual Result<Reply> call(Request request, const Deadline& deadline) = 0;
};

/// For the last word on a call whose time is up: a taken queue item or a released barrier may cross its cancellation.
inline constexpr Duration kCancelGrace = std::chrono::seconds(1);
/// For the last exchange with a server of such a call: what is decided there must be known here.
Deadline with_grace(const Deadline& deadline);
/// kTimeout for `request`, which names its keys and `where` the store is.
Error timed_out(const Request& request, const std::string& where);
/// "get(\"a\")", "wait(\"a\", \"b\" and 3 more)": for messages.
std::string describe(const Request& request);

}  // namespace muster
