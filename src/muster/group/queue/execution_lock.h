#pragma once

#include <atomic>
#include <cstdint>

namespace muster {

/// Who may run an operation, and how many operations were begun, in one word: a call on an idle group takes the lock
/// and its sequence number in one step, without the mutex of the call queue. require_slow_path() makes such steps fail,
/// so that the lock is taken and released with the mutex held from then on. Thread-safe.
///
/// Memory order: taking the lock acquires and releasing it releases, so each operation sees the effects of the one
/// before. The other steps happen with the mutex held, which orders them.
class ExecutionLock {
 public:
  /// The sequence number of the operation to run now; zero: not without the mutex.
  uint64_t take_if_idle() {
    uint64_t idle = word_.load(std::memory_order_relaxed) & ~kFlags;
    const bool taken = word_.compare_exchange_strong(idle, idle + kOne + kTaken, std::memory_order_acquire);
    return taken ? idle / kOne + 1 : 0;
  }
  /// False: the mutex is needed.
  bool release_if_idle(uint64_t sequence) {
    uint64_t mine = sequence * kOne + kTaken;
    return word_.compare_exchange_strong(mine, mine - kTaken, std::memory_order_release);
  }

  // With the mutex held.
  void require_slow_path() { word_.fetch_or(kSlowPath, std::memory_order_relaxed); }
  // After require_slow_path().
  bool taken() const { return (word_.load(std::memory_order_acquire) & kTaken) != 0; }
  void take() { word_.fetch_or(kTaken, std::memory_order_acquire); }
  /// `idle`: the fast path is allowed again.
  void release(bool idle) { word_.fetch_and(idle ? ~kFlags : ~kTaken, std::memory_order_release); }
  uint64_t next_sequence() { return word_.fetch_add(kOne, std::memory_order_relaxed) / kOne + 1; }

  /// The last sequence number that was given. Needs no mutex.
  uint64_t sequence() const { return word_.load(std::memory_order_relaxed) / kOne; }

 private:
  static constexpr uint64_t kTaken = 1, kSlowPath = 2, kFlags = 3, kOne = 4;
  std::atomic<uint64_t> word_ = 0;
};

}  // namespace muster
