#pragma once

#include <atomic>
#include <cstdint>

namespace muster {

/// The right to run an operation, and the number of operations that have begun, in one atomic word. On the fast path, a
/// call on an idle group takes the lock and its sequence number in one step, without the mutex of the call queue.
/// require_slow_path() makes the fast path fail. From then on the lock is taken and released only with the mutex held,
/// until release(true) allows the fast path again. Thread-safe.
///
/// Fields of the word, and why concurrent steps on them are safe:
///
/// - kTaken: at most one thread holds the lock. A fast take is a compare-exchange that expects both flags to be clear,
///   so it fails if the lock is held. A slow take happens with the mutex held, after require_slow_path() and a check of
///   taken(), so no fast take can come between the check and the take.
/// - kSlowPath: set and cleared only with the mutex held. A fast release expects it to be clear. So a holder that took
///   the lock on the fast path needs the mutex after require_slow_path(), and then sees the queued calls.
/// - The sequence number: a fast take increases it together with kTaken. next_sequence() increases it with the mutex
///   held, after require_slow_path(). Every increment is an atomic read-modify-write, so no number is used twice.
///
/// Memory order: every take acquires and every release is a release, so each operation sees the effects of the one
/// before it. taken() acquires as well: a thread that finds the lock free sees the effects of the last operation. Steps
/// that only change kSlowPath or the number are relaxed: they publish no data, and the mutex orders everything else. A
/// relaxed step between a release and the next take does no harm, because a read-modify-write continues the release
/// sequence.
class ExecutionLock {
 public:
  /// Fast path: takes the lock and returns the sequence number of the operation to run now. Returns zero if the caller
  /// needs the mutex.
  uint64_t take_if_idle() {
    uint64_t idle = word_.load(std::memory_order_relaxed) & ~kFlags;
    const bool taken = word_.compare_exchange_strong(idle, idle + kOne + kTaken, std::memory_order_acquire);
    return taken ? idle / kOne + 1 : 0;
  }
  /// Fast path: releases the lock. Returns false if the caller needs the mutex; it then still holds the lock.
  bool release_if_idle(uint64_t sequence) {
    uint64_t mine = sequence * kOne + kTaken;
    return word_.compare_exchange_strong(mine, mine - kTaken, std::memory_order_release);
  }

  // The functions below require the mutex, except sequence().
  void require_slow_path() { word_.fetch_or(kSlowPath, std::memory_order_relaxed); }
  // The functions below also require a call of require_slow_path() before.
  bool taken() const { return (word_.load(std::memory_order_acquire) & kTaken) != 0; }
  void take() { word_.fetch_or(kTaken, std::memory_order_acquire); }
  /// If `idle` is true, allows the fast path again.
  void release(bool idle) { word_.fetch_and(idle ? ~kFlags : ~kTaken, std::memory_order_release); }
  uint64_t next_sequence() { return word_.fetch_add(kOne, std::memory_order_relaxed) / kOne + 1; }

  /// The last sequence number that was taken.
  uint64_t sequence() const { return word_.load(std::memory_order_relaxed) / kOne; }

 private:
  static constexpr uint64_t kTaken = 1, kSlowPath = 2, kFlags = 3, kOne = 4;
  std::atomic<uint64_t> word_ = 0;
};

}  // namespace muster
