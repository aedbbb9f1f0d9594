#include "muster/group/p2p/p2p_driver.h"

#include <poll.h>

#include <algorithm>
#include <string>
#include <system_error>

#include "muster/base/log.h"

namespace muster {
namespace {

/// The longest sleep. No deadline is missed by more than this.
constexpr Duration kMaxSleep = 100ms;
/// One in this many turns polls the kernel for events. The other turns only read shared memory, which is cheaper.
constexpr unsigned kPollKernelEvery = 16;
/// After this many naps without work, the driver's own thread sleeps until it is notified.
constexpr int kMaxIdleNaps = 50;

}  // namespace

void P2pDriver::wait_until(Lock& lock, const std::function<bool()>& done, const Deadline& deadline) {
  while (!done() && !deadline.passed()) {
    if (driven_by_ == DrivenBy::kNoThread) {
      driven_by_ = DrivenBy::kWaitingThread;
      take_turns(lock, done, deadline);
      driven_by_ = DrivenBy::kNoThread;
      notify();
      run_callbacks(lock);
      continue;
    }
    ++waiting_;
    if (driven_by_ == DrivenBy::kOwnThread) wake();  // the own thread then leaves the loop to this thread
    changed_.wait_for(lock, std::min(deadline.left(), kMaxSleep),
                      [&] { return driven_by_ == DrivenBy::kNoThread || done(); });
    --waiting_;
    client_.expire();
  }
  if (stopping_) changed_.notify_all();
}

/// Drives the loop until `done`, the deadline, or the first callback. Callbacks cannot run inside this function,
/// because a callback may wait for a message and must then be able to drive the loop.
void P2pDriver::take_turns(Lock& lock, const std::function<bool()>& done, const Deadline& deadline) {
  poll_wait_.reset();
  for (unsigned turn = 1; !done(); ++turn) {
    const bool poll_kernel = turn % kPollKernelEvery == 0;
    const bool moved = poll_kernel ? loop_->poll() : loop_->run_pollers();
    if (poll_kernel) {
      client_.expire();
      if (deadline.passed()) return;
    }
    if (done() || !callbacks_.empty()) return;
    const Duration idle = moved ? Duration::zero() : loop_->idle_time(kMaxSleep);
    if (idle > Duration::zero()) {
      park(lock, std::min(idle, deadline.left()));
      poll_wait_.reset();
      continue;
    }
    lock.unlock();
    if (moved) poll_wait_.reset();
    if (moved || !poll_wait_.idle()) spin_pause();
    lock.lock();
  }
}

/// Sleeps until the loop has an event. A thread that adds work calls wake() to end the sleep.
void P2pDriver::park(Lock& lock, Duration max_sleep) {
  if (loop_->poll()) return;
  max_sleep = std::min(max_sleep, std::max(client_.next_deadline() - steady_clock().now(), Duration::zero()));
  parked_ = true;
  lock.unlock();
  pollfd events{loop_->descriptor(), POLLIN, 0};
  const timespec timeout{static_cast<time_t>(max_sleep.count() / 1'000'000'000),
                         static_cast<long>(max_sleep.count() % 1'000'000'000)};
  (void)ppoll(&events, 1, &timeout, nullptr);
  lock.lock();
  parked_ = false;
  loop_->poll();
  client_.expire();
}

void P2pDriver::run_callbacks(Lock& lock) {
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

void P2pDriver::provide_progress() {
  wake();
  if (stopping_) return;
  if (!thread_.joinable()) {
    try {
      thread_ = std::thread([this] { run_own_thread(); });
    } catch (const std::system_error& error) {
      log(LogLevel::kWarning,
          std::string("cannot start a thread; messages move only while a thread waits for one: ") + error.what());
    }
  } else if (asleep_) {
    work_.notify_one();
  }
}

/// A thread that has just begun an operation usually waits for it soon, and then drives the loop itself. So the own
/// thread naps before it takes the loop. While it naps, callers need not notify it, which keeps begin calls cheap.
void P2pDriver::run_own_thread() {
  Lock lock(mutex_);
  for (int naps = 0; !stopping_;) {
    if (naps >= kMaxIdleNaps) {
      asleep_ = true;
      work_.wait(lock, [this] { return stopping_ || (client_.has_work() && driven_by_ == DrivenBy::kNoThread); });
      asleep_ = false;
      naps = 0;
    }
    work_.wait_for(lock, kGrace, [this] { return stopping_; });
    ++naps;
    const auto not_needed = [this] { return stopping_ || waiting_ > 0 || !client_.has_work(); };
    while (!not_needed() && driven_by_ == DrivenBy::kNoThread) {
      naps = 0;
      driven_by_ = DrivenBy::kOwnThread;
      take_turns(lock, not_needed, Deadline::never());
      driven_by_ = DrivenBy::kNoThread;
      changed_.notify_all();
      run_callbacks(lock);
    }
  }
}

bool P2pDriver::stop(Lock& lock) {
  if (stopping_) return false;
  stopping_ = true;
  wake();
  work_.notify_all();
  run_callbacks(lock);
  changed_.wait(lock, [this] { return driven_by_ == DrivenBy::kNoThread && waiting_ == 0 && calling_ == 0; });
  lock.unlock();
  if (thread_.joinable()) thread_.join();
  lock.lock();
  return true;
}

}  // namespace muster
