#pragma once

#include <string>

#include "muster/store/state/state.h"
#include "muster/store/store.h"

namespace muster {

/// Implements every operation of Store by one: send a Request, wait for its Reply. Thread-safe if call() is.
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
  /// Returns the reply, or its status if that is an error. The implementation sets `request.id`.
  virtual Result<Reply> call(Request request, const Deadline& deadline) = 0;
};

/// A store in a server that is not muster's.
class ExternalStore : public RequestStore {
 protected:
  /// Errors name the request and the server.
  Result<Reply> call(Request request, const Deadline& deadline) final;
  virtual Result<Reply> carry_out(Request& request, const Deadline& deadline) = 0;
  /// For messages: "Redis at host:port".
  virtual std::string server() const = 0;
};

/// How long a call waits for the answer to its cancellation: it may have taken a queue item, or passed a barrier.
inline constexpr Duration kCancelGrace = std::chrono::seconds(1);
/// For an exchange with a server that must not be given up in the middle.
Deadline with_grace(const Deadline& deadline);
/// 32 hexadecimal digits that no other call returns.
std::string random_token();
/// kTimeout for `request`. Names its keys and `where` the store is.
Error timed_out(const Request& request, const std::string& where);
/// For messages: "get(\"a\")", "wait(\"a\", \"b\" and 3 more)".
std::string describe(const Request& request);

}  // namespace muster
