#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "muster/base/process_owned.h"
#include "muster/store/store.h"

namespace muster {

/// A lock that one process holds, made by Store::claim(). If the process dies, the lock expires. Its destructor
/// releases the lock at once. Must not outlive the program's main(). Thread-safe.
class TtlLock {
 public:
  virtual ~TtlLock() = default;
  /// False once another process may hold the lock: the store has not answered for the time to live, or has lost the
  /// lock. It then stays false. The holder must check this before every step that only the holder may take.
  virtual bool held() const = 0;
};

/// A lock that expires unless it is renewed. A thread renews it three times per time to live. In a forked child the
/// lock is still the parent's.
class RenewedTtlLock final : public TtlLock, public ProcessOwned<RenewedTtlLock> {
 public:
  struct Store {
    /// True if the lock was still held; it is then held for another time to live. An error if the store did not answer.
    std::function<Result<bool>(const Deadline&)> renew;
    std::function<void(const Deadline&)> release;
  };
  /// `claimed` is the time at which the request that took the lock was sent.
  RenewedTtlLock(Store store, TimePoint claimed, Duration time_to_live);
  ~RenewedTtlLock() override;
  bool held() const override;

 private:
  void renew_until_ended();

  const Store store_;
  const Duration time_to_live_;
  mutable std::mutex mutex_;  // guards ends_ and expires_
  std::condition_variable ended_;
  bool ends_ = false;
  TimePoint expires_;
  std::thread thread_;
};

/// The kAlreadyExists error for a lock that another process holds.
tl::unexpected<Error> lock_is_held(const Key& name);

using Claim [[deprecated("renamed to TtlLock")]] = TtlLock;

}  // namespace muster
