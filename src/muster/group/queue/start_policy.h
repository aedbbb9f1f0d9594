#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "muster/collective/operation.h"

namespace muster {

/// Decides whether a progress thread is woken for an operation that is queued.
///
/// To wake a thread costs more than a small operation. If the caller waited for its last operations before they had
/// ended, it will probably do so again, and its thread can run small ones. Then no thread is woken. A progress thread
/// looks at intervals, and begins operations that it has seen before, in case the caller does not wait this time.
///
/// Guarded by the mutex of the call queue.
class StartPolicy {
 public:
  /// Called for each operation that is queued, after it has its sequence number.
  void queued(const Operation& operation) {
    last_queued_ = operation.call.sequence;
    urgent_ |= !is_small(operation);
  }
  /// Called when a thread waits for an operation that has not ended.
  void awaited() { awaited_ = std::min(awaited_ + 1, kTrusted); }
  /// Called when a thread waits, and queued operations must go on meanwhile.
  void need_progress() { urgent_ = true; }
  /// Called when the queue is empty.
  void drained() { urgent_ = false; }

  /// True if the queued operations need a progress thread that is woken.
  bool wakes() const { return looking_ == 0 || is_eager(); }

  /// A progress thread waits until ready(n) is true, where operations up to sequence number n may begin.
  template <typename Ready>
  void wait(std::unique_lock<std::mutex>& lock, std::condition_variable& changed, const Ready& ready) {
    uint64_t seen = 0;
    uint64_t begins = is_eager() ? last_queued_ : 0;
    while (!ready(begins)) {
      if (seen == last_queued_) {  // no new operation since the last look
        changed.wait(lock);
        begins = is_eager() ? last_queued_ : 0;
        seen = 0;  // so it looks before it sleeps again
        continue;
      }
      seen = last_queued_;
      ++looking_;
      const bool woken = changed.wait_for(lock, kLookInterval) == std::cv_status::no_timeout;
      --looking_;
      begins = woken ? last_queued_ : seen;
      if (!woken && ready(begins)) awaited_ = 0;
    }
  }

 private:
  /// With more bytes, waiting for the next look would cost more than it saves.
  static constexpr size_t kSmallBytes = 64 << 10;
  static constexpr std::chrono::milliseconds kLookInterval{1};
  /// After so many waits, the caller is expected to wait for the next operations, too.
  static constexpr int kTrusted = 2;

  bool is_eager() const { return urgent_ || awaited_ < kTrusted; }
  static bool is_small(const Operation& operation) {
    return std::max(operation.input.bytes(), operation.output.bytes()) <= kSmallBytes;
  }

  int looking_ = 0;  ///< progress threads that look at intervals
  int awaited_ = 0;  ///< waits since the last wrong guess, at most kTrusted
  uint64_t last_queued_ = 0;
  bool urgent_ = false;  ///< a queued operation cannot wait for the next look
};

}  // namespace muster
