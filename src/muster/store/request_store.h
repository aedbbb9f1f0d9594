#pragma once

#include <string>

#include "muster/store/state/state.h"
#include "muster/store/store.h"

namespace muster {

/// Implements every operation of Store with one function, call(), which sends a Request and waits for its Reply.
/// Thread-safe if call() is.
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
  /// Returns the reply, or the error in its status. The implementation sets `request.id`.
  virtual Result<Reply> call(Request request, const Deadline& deadline) = 0;
};

/// A store in a server that is not muster's.
class ExternalStore : public RequestStore {
 protected:
  /// Every error names the request. A timeout names the server too.
  Result<Reply> call(Request request, const Deadline& deadline) final;
  virtual Result<Reply> carry_out(Request& request, const Deadline& deadline) = 0;
  /// For messages: "Redis at host:port".
  virtual std::string server() const = 0;
};

/// How long a call waits for the answer to its cancellation. The wait is needed because the call may have taken a queue
/// item, or may have been released at a barrier.
inline constexpr Duration kCancelGrace = std::chrono::seconds(1);
/// Extends the deadline by kCancelGrace, for an exchange with a server that must not be given up in the middle.
Deadline with_grace(const Deadline& deadline);
/// Returns 32 random hexadecimal digits, so two calls never return the same token in practice.
std::string random_token();
/// The kTimeout error for `request`. It names the request's keys and `where`, the place of the store.
Error timed_out(const Request& request, const std::string& where);
/// For messages: "get(\"a\")", "wait(\"a\", \"b\" and 3 more)".
std::string describe(const Request& request);

}  // namespace muster
