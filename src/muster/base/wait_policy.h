#pragma once

#include <algorithm>
#include <optional>
#include <utility>

#include "muster/base/clock.h"

namespace muster {

// Defines how a thread waits for memory that another thread or process writes, and the constants of all such waits.
//
// A wait has up to three phases. The thread spins: it reads the memory again and again. Then it yields: it gives its
// core to other threads that are ready to run. Then it parks: it sleeps in the kernel until the writer wakes it.
//
//   waiter               spins                        yields                      parks
//   host communicator    32 to 3000 polls, adaptive   at most 4 times             on a futex, 2 ms at a time
//   loop with pollers    8 polls                      after every further poll    never while it has pollers
//   shm link             50 to 200 us, adaptive       as its loop does            until the peer sends a doorbell
//   loop driver          64 polls                     after every further poll    when its loop has no pollers
//
// A loop driver (io/loop_driver.h) drives the loop of messages and that of remote calls. It also yields at its first
// idle poll after a wake, and after it has rung a doorbell: the thread at the other end may need this core.
//
// Ranks that share a core give it to each other with a yield. A spin would only delay that. So the host communicator
// spins only a little unless there is a core for each rank, and both it and the shm link migrate away from a core that
// the awaited rank uses (shm/cpu_migrator.h). Threads come to share a core because the kernel likes to wake a thread on
// the core of the thread that wakes it.

/// The number of polls in the longest spin (some 50 us in all) and in the shortest spin.
inline constexpr int kMaxSpins = 3000;
inline constexpr int kMinSpins = 32;
/// Yields between a spin and a park: the awaited thread may only need the core, and a yield costs less than a park.
inline constexpr int kYieldsBeforePark = 4;
/// A yield that takes longer than this means that the core went to a thread that computes.
inline constexpr Duration kMaxTurn = 1ms;
/// A parked rank drives its links, and so notices the death of a peer, this often; less often above 16 ranks.
inline constexpr Duration kParkSlice = 2ms;
/// The longest sleep while a wake may be missed (HostComm::publish_word()).
inline constexpr Duration kFirstParkSlice = 200us;
/// After so many idle spins a rank reads again which cores the ranks may use.
inline constexpr unsigned kIdleSpinsPerCoreCheck = 64;
/// An end of a shm link polls for so long after the last bytes: a multiple of the cost of being woken.
inline constexpr Duration kMinLinkSpin = 50us;
inline constexpr Duration kMaxLinkSpin = 200us;
/// If so much time passes between two polls of a thread, others have run on its core.
inline constexpr Duration kOthersRan = 15us;
/// Idle polls of a loop, and of the P2P engine, before the thread yields.
inline constexpr int kLoopPolls = 8;
inline constexpr int kMessagePolls = 64;
/// The least time between two migrations of a thread, for the case that other threads want the same cores.
inline constexpr Duration kMigrationInterval = 5ms;

/// Asks the kernel to run the calling thread soon after it wakes, although other threads compute: its time slices
/// become shorter than theirs, and its share of the core stays the same. Linux 6.12 and newer do so; older ones ignore
/// it.
void take_short_slices();

/// Tells the processor that this is a spin loop.
inline void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

/// Yields as long as yields are cheap. Not thread-safe.
///
/// Among ranks that share a core a yield is the cheapest hand-over, and only few yields are slow. Beside a thread that
/// computes, most yields cost a whole time slice, some milliseconds, in each wait of a collective. So slow yields take
/// at most 1/64 of the time, after a burst of 20 ms (a token bucket). When this budget is used up, the caller parks
/// instead, and the kernel gives a parked thread the core soon after it is woken.
class YieldBudget {
 public:
  /// A yield that takes longer than `cheap` has given the core to a thread that computes.
  explicit YieldBudget(Duration cheap = kMaxTurn, const Clock& clock = steady_clock());
  /// Calls sched_yield(). Returns false at once if the budget is used up.
  bool yield();

 private:
  const Duration cheap_;
  const Clock& clock_;
  TimePoint paid_until_;  ///< each slow yield moves this ahead by 64 times its length
};

/// The spin and yield phases of a thread that waits often, for one word at a time, and then parks.
///
/// A spin that ends in a park halves the next one, so that a rank that shares its core soon stops wasting it. A wait
/// that ends without a park doubles the next spin.
class AdaptiveWait {
 public:
  /// `own_core`: there is a core for each thread that waits. `turn`: see YieldBudget.
  AdaptiveWait(bool own_core, Duration turn) : yields_(turn) { set_own_core(own_core); }
  void set_own_core(bool own_core) { spins_ = max_spins_ = own_core ? kMaxSpins : kMinSpins; }

  /// Polls until `done()` or until the spin is over. True if done.
  template <class Done>
  bool spin(Done&& done) {
    for (int i = spins_; i > 0; --i) {
      spin_pause();
      if (done()) return lengthen();
    }
    return false;
  }
  /// Yields a few times. True if done; if not, the caller parks.
  template <class Done>
  bool yield(Done&& done) {
    for (int i = 0; i < kYieldsBeforePark && yields_.yield(); ++i) {
      if (done()) return lengthen();
    }
    spins_ = std::max(kMinSpins, spins_ / 2);
    return false;
  }
  /// Polls of the next spin.
  int spins() const { return spins_; }

 private:
  bool lengthen() {
    spins_ = std::min(max_spins_, 2 * spins_);
    return true;
  }

  YieldBudget yields_;
  int max_spins_ = 0;
  int spins_ = 0;
};

/// How long an end of a shm link polls before it parks. If the longest spin would have found the bytes that end a
/// sleep, the next spin is twice as long; otherwise it is half as long. So two ends that compute for a while between
/// their messages stay awake, and an end that waits for long does not waste its core. Nor does one that shares its
/// core: if other threads have run between two polls, the next spin is half as long, too.
class LinkSpin {
 public:
  /// Bytes have moved, or are expected. The spin begins with the next poll: the thread may have work to do before.
  void restart() {
    begun_.reset();
    parked_ = false;
  }
  /// Called at each poll that finds nothing. True if the spin is over.
  bool is_over(TimePoint now) {
    alone_ = !begun_ || (alone_ && now - polled_at_ <= kOthersRan);
    polled_at_ = now;
    if (!begun_) begun_ = now;
    return now - *begun_ >= length_;
  }
  /// The spin is over, and the end parks.
  void park() { parked_ = true; }
  /// The peer has woken this end.
  void wake(TimePoint now) {
    if (!std::exchange(parked_, false)) return;
    const bool longer = alone_ && now - *begun_ < kMaxLinkSpin;
    length_ = longer ? std::min(2 * length_, kMaxLinkSpin) : std::max(length_ / 2, kMinLinkSpin);
  }

 private:
  Duration length_ = kMinLinkSpin;
  std::optional<TimePoint> begun_;
  TimePoint polled_at_;
  bool alone_ = true;  ///< no other thread has run on this core during the spin
  bool parked_ = false;
};

/// For a thread that polls many sources in turn. After `polls` idle polls in a row, the thread yields after every
/// further idle poll.
class PollWait {
 public:
  explicit PollWait(int polls) : polls_(polls) {}
  /// A poll found something, or a new wait begins.
  void reset() { idle_ = 0; }
  /// A poll found nothing. True if the thread yielded.
  bool idle() { return ++idle_ > polls_ && yield(); }
  /// Yields without further polls. True if the thread yielded.
  bool yield() { return yields_.yield(); }

 private:
  const int polls_;
  int idle_ = 0;
  YieldBudget yields_;
};

}  // namespace muster
