#pragma once

#include <atomic>
#include <cstdint>

namespace muster {

/// Whose turn it is to run an operation, and how many were begun: in one word, so that a call on an idle group takes
/// the turn and its number at once, without the group's lock. Where there is anything else to look after, its owner
/// says so with demand(), the lock held: from then on the turn is taken and given back with the lock held. Thread-safe.
class ExecutionLock {
 public:
  /// The number of the operation to run now; zero: not without the lock.
  uint64_t take_if_idle() {
    uint64_t idle = word_.load(std::memory_order_relaxed) & ~kFlags;
    const bool taken = word_.compare_exchange_strong(idle, idle + kOne + kTaken, std::memory_order_acquire);
    return taken ? idle / kOne + 1 : 0;
  }
  /// False where the lock is needed.
  bool give_back_if_idle(uint64_t number) {
    uint64_t mine = number * kOne + kTaken;
    return word_.compare_exchange_strong(mine, mine - kTaken, std::memory_order_release);
  }

  // With the lock held.
  void require_slow_path() { word_.fetch_or(kDemand, std::memory_order_relaxed); }
  /// After demand(), as are those below.
  bool taken() const { return (word_.load(std::memory_order_acquire) & kTaken) != 0; }
  void take() { word_.fetch_or(kTaken, std::memory_order_acquire); }
  void give_back(bool idle) { word_.fetch_and(idle ? ~kFlags : ~kTaken, std::memory_order_release); }
  uint64_t next_number() { return word_.fetch_add(kOne, std::memory_order_relaxed) / kOne + 1; }

  uint64_t numbers() const { return word_.load(std::memory_order_relaxed) / kOne; }

 private:
  static constexpr uint64_t kTaken = 1, kDemand = 2, kFlags = 3, kOne = 4;
  std::atomic<uint64_t> word_ = 0;
};

}  // namespace muster
