#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "muster/store/store.h"

namespace muster {

/// A name that one process holds for as long as it lives: Store::claim() makes it. A thread of its own renews it every
/// third of its time to live; destroying it gives the name up at once. Must not outlive the program's main().
/// Thread-safe.
class TtlLock {
 public:
  virtual ~TtlLock() = default;
  /// False once the name may be another's, because nothing was heard from the store for the whole time to live or the
  /// store forgot the claim. Never true again then. Ask before every step that only the holder may take.
  virtual bool held() const = 0;
};

/// How stores whose claims expire keep one up.
class RenewedTtlLock : public TtlLock {
 public:
  struct Store {
    /// Whether the claim still stood and lives on for its time to live; an error when the store did not say.
    std::function<Result<bool>(const Deadline&)> renew;
    std::function<void(const Deadline&)> release;
  };
  /// `claimed`: when the request that made the claim was sent.
  RenewedTtlLock(Store store, TimePoint claimed, Duration time_to_live);
  ~RenewedTtlLock() override;
  bool held() const override;

 private:
  void keep_up();

  const Store store_;
  const Duration time_to_live_;
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  bool ends_ = false;
  TimePoint lives_until_;
  std::thread thread_;
};

using Claim [[deprecated("renamed to TtlLock")]] = TtlLock;

}  // namespace muster
