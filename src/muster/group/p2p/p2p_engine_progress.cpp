// Who drives the loop. All of it happens under the lock, which is given up only to sleep, to call back and between two
// turns: so a call of another thread never waits for longer than a turn, and does what it has to do by itself.
#include <poll.h>

#include <algorithm>
#include <system_error>

#include "muster/base/log.h"
#include "muster/group/p2p/p2p_engine.h"
#include "muster/shm/futex.h"

namespace muster {
namespace {

/// No sleep is longer, so no deadline is missed by more.
constexpr Duration kMaxSleep = 100ms;
/// Vain turns before others are let onto the core.
constexpr int kYieldAfter = 64;
/// Of so many turns one asks the kernel for events; the others look at shared memory only.
constexpr unsigned kAskEvery = 16;
/// The thread goes to sleep for good after so many naps without work.
constexpr int kIdleNaps = 50;

}  // namespace

void P2pEngine::drive(Work::State& state, const Deadline& deadline) {
  auto& operation = static_cast<MessageOperation&>(state);
  Lock lock(mutex_);
  wait_until(
      lock, [&] { return operation.over; }, deadline);
  if (has_work()) wake_thread();
  call_back(lock);
}

void P2pEngine::wait_until(Lock& lock, const std::function<bool()>& done, const Deadline& deadline) {
  while (!done() && !deadline.passed()) {
    if (!driving_) {
      driving_ = true;
      take_turns(lock, done, deadline);
      driving_ = false;
      if (waiting_ > 0) changed_.notify_all();
      call_back(lock);
      continue;
    }
    ++waiting_;
    if (by_thread_ && parked_) loop_->wake();  // it leaves the loop to whoever waits
    changed_.wait_for(lock, std::min(deadline.left(), kMaxSleep), [&] { return !driving_ || done(); });
    --waiting_;
    expire();
  }
  if (stopping_) changed_.notify_all();
}

/// Until it is done or somebody is to be called back: not from in here, for a callback may wait for a message too.
void P2pEngine::take_turns(Lock& lock, const std::function<bool()>& done, const Deadline& deadline) {
  int vain = 0;
  for (unsigned execution_lock = 1; !done(); ++execution_lock) {
    const bool ask = execution_lock % kAskEvery == 0;
    const bool moved = ask ? loop_->poll() : loop_->run_pollers();
    vain = moved ? 0 : vain + 1;
    if (ask) {
      expire();
      if (deadline.passed()) return;
    }
    if (done() || !callbacks_.empty()) return;
    const Duration idle = moved ? Duration::zero() : loop_->idle_time(kMaxSleep);
    if (idle > Duration::zero()) {
      park(lock, std::min(idle, deadline.left()));
      vain = 0;
      continue;
    }
    lock.unlock();
    if (vain < kYieldAfter || !yields_.yield()) spin_pause();
    lock.lock();
  }
}

/// Sleeps until the loop has something to do. Whoever changes what it waits for meanwhile wakes it.
void P2pEngine::park(Lock& lock, Duration longest) {
  if (loop_->poll()) return;
  longest = std::min(longest, std::max(earliest_ - steady_clock().now(), Duration::zero()));
  parked_ = true;
  lock.unlock();
  pollfd events{loop_->descriptor(), POLLIN, 0};
  const timespec wait{static_cast<time_t>(longest.count() / 1'000'000'000),
                      static_cast<long>(longest.count() % 1'000'000'000)};
  (void)ppoll(&events, 1, &wait, nullptr);
  lock.lock();
  parked_ = false;
  loop_->poll();
  expire();
}

void P2pEngine::call_back(Lock& lock) {
  while (!callbacks_.empty()) {
    std::vector<std::function<void()>> callbacks;
    callbacks.swap(callbacks_);
    ++calling_;
    lock.unlock();
    for (auto& callback : callbacks) callback();
    callbacks.clear();
    lock.lock();
    if (--calling_ == 0 && stopping_) changed_.notify_all();
  }
}

// ---- the thread

/// There is work: sees to it that somebody does it, if nobody waits for it.
void P2pEngine::wake_thread() {
  if (parked_) loop_->wake();  // it may sleep until something else than what has just been added
  if (stopping_) return;
  if (!thread_.joinable()) {
    try {
      thread_ = std::thread([this] { progress(); });
    } catch (const std::system_error& error) {
      log(LogLevel::kWarning,
          std::string("messages move only while somebody waits: cannot start a thread: ") + error.what());
    }
  } else if (asleep_) {
    work_.notify_one();
  }
}

/// Whoever has just begun something will most likely wait for it in a moment, and take turns without any hand-over. So
/// the thread naps for a while before it takes the loop, and while it naps nobody has to rouse it.
void P2pEngine::progress() {
  Lock lock(mutex_);
  for (int naps = 0; !stopping_;) {
    if (naps >= kIdleNaps) {
      asleep_ = true;
      work_.wait(lock, [this] { return stopping_ || (has_work() && !driving_); });
      asleep_ = false;
      naps = 0;
    }
    work_.wait_for(lock, kGrace, [this] { return stopping_; });
    ++naps;
    if (stopping_ || !has_work() || driving_ || waiting_ > 0) continue;
    naps = 0;
    const auto unwanted = [this] { return stopping_ || waiting_ > 0 || !has_work(); };
    while (!unwanted() && !driving_) {
      driving_ = by_thread_ = true;
      take_turns(lock, unwanted, Deadline::never());
      driving_ = by_thread_ = false;
      changed_.notify_all();
      call_back(lock);
    }
  }
}

}  // namespace muster
