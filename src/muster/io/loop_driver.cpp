#include "muster/io/loop_driver.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <system_error>
#include <utility>

#include "muster/base/check.h"
#include "muster/base/log.h"

namespace muster {
namespace {

/// The longest sleep. No deadline is missed by more than this.
constexpr Duration kMaxSleep = 100ms;
/// One in this many turns polls the kernel for events. The other turns only read shared memory, which is cheaper.
constexpr unsigned kPollKernelEvery = 16;
/// No sleep is ended because it would end later than needed by less than this.
constexpr Duration kWakeSlack = 50us;
/// An own thread that sleeps in the loop does not sleep on if waiting threads drive it more often than this meanwhile:
/// making the pollers rest each time would cost more than its naps.
constexpr uint64_t kMaxDrivesInSleep = 256;
/// The most own threads. It bounds the nesting of tasks that wait for each other's calls.
constexpr size_t kMaxThreads = 1024;

thread_local const LoopDriver* own_thread_of = nullptr;
/// The driver whose callback this thread runs.
thread_local const LoopDriver* calling_for = nullptr;
/// This thread is one of a driver's own, and runs a task.
thread_local bool runs_task = false;

}  // namespace

LoopDriver::LoopDriver(std::unique_ptr<Loop> loop, Delegate& delegate, Options options)
    : delegate_(delegate),
      max_drive_(options.max_drive),
      loop_(std::move(loop)),
      wake_up_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      tasks_(options.max_tasks),
      standby_(
          options.grace, [this] { return tasks_.ready(); },
          [this] {
            return Standby::Activity{drives_, tasks_.started(), tasks_.last_is_serial()};
          }) {}

bool LoopDriver::on_own_thread() const { return own_thread_of == this; }
bool LoopDriver::is_inside() const { return on_own_thread() || calling_for == this; }

void LoopDriver::wait_until(Lock& lock, const std::function<bool()>& done, const Deadline& deadline,
                            std::function<void()> begin) {
  if (on_own_thread()) pause_task(true);
  const Deadline shift = Deadline::after(max_drive_);
  bool looks_on = false;
  const auto leaves = [&] { return !begin && (looks_on || ((tasks_.ready() || waiting_ > 0) && shift.passed())); };
  while (!done() && !deadline.passed()) {
    if (looks_on = leaves(); looks_on) {
      look_on(lock, done, deadline);
      run_callbacks(lock);
      continue;
    }
    if (is_free()) {
      parked_ = false;
      set_driver(DrivenBy::kWaitingThread);
      (void)take_turns(
          lock, [&] { return done() || leaves(); }, deadline, std::exchange(begin, nullptr));
      looks_on = leaves();
      give_back();
      run_callbacks(lock);
      continue;
    }
    if (begin) std::exchange(begin, nullptr)();
    wake_in_time();
    ++waiting_;  // an own thread then leaves the loop to this thread
    changed_.wait_for(lock, std::min(deadline.left(), kMaxSleep), [&] { return is_free() || done(); });
    --waiting_;
    delegate_.expire();
  }
  if (on_own_thread()) pause_task(false);
  if (stopping_) changed_.notify_all();
  if (delegate_.has_work()) provide_driver();
}

/// Waits while others drive the loop.
void LoopDriver::look_on(Lock& lock, const std::function<bool()>& done, const Deadline& deadline) {
  provide_driver();
  Bystander self{done, {}};
  bystanders_.push_back(&self);
  self.wake.wait_for(lock, std::min(deadline.left(), kMaxSleep), done);
  std::erase(bystanders_, &self);
}

void LoopDriver::set_driver(DrivenBy driver) {
  driven_by_ = driver;
  loop_->set_polled(driver != DrivenBy::kNoThread && !parked_);
}

/// The loop goes back to the own thread that sleeps in it. That thread cannot poll, so the pollers must rest. They may
/// find a last message then, and so a task, which wakes that thread.
void LoopDriver::give_back() {
  set_driver(DrivenBy::kNoThread);
  const bool sleeps_on = sleeper_ && !stopping_ && drives_ - sleeper_->drives < kMaxDrivesInSleep;
  if (sleeps_on && loop_->rest() && sleeper_) {
    parked_ = true;
    parked_until_ = sleeper_->until;
    set_driver(DrivenBy::kOwnThread);
    tasks_.ready() ? alert() : wake_in_time();
  } else {
    wake_sleeper();
    sleeper_.reset();
  }
  notify();
}

/// Another thread that polls the loop cannot take this wake-up from it.
void LoopDriver::wake_sleeper() {
  if (!sleeper_ || std::exchange(sleeper_->woken, true)) return;
  const uint64_t one = 1;
  (void)!::write(wake_up_.get(), &one, sizeof one);
}

/// Drives the loop until `done`, the deadline, or the first callback. Callbacks cannot run inside this function,
/// because a callback may wait for a message and must then be able to drive the loop. Returns false if another thread
/// has begun to drive the loop while this one slept.
bool LoopDriver::take_turns(Lock& lock, const std::function<bool()>& done, const Deadline& deadline,
                            std::function<void()> begin) {
  ++drives_;
  delegate_.flush();
  if (begin) begin();
  poll_wait_.reset();
  for (unsigned turn = 1; !done(); ++turn) {
    const bool poll_kernel = turn % kPollKernelEvery == 0;
    const bool moved = poll_kernel ? loop_->poll() : loop_->run_pollers();
    if (poll_kernel) {
      delegate_.expire();
      if (deadline.passed()) return true;
    }
    if (done() || !callbacks_.empty()) return true;
    const Duration idle = moved ? Duration::zero() : loop_->idle_time(kMaxSleep);
    if (idle > Duration::zero()) {
      if (!park(lock, std::min(idle, deadline.left()))) return false;
      poll_wait_.reset();
      continue;
    }
    const bool yields = loop_->take_yield();
    lock.unlock();
    if (moved) poll_wait_.reset();
    if (moved || !(yields ? poll_wait_.yield() : poll_wait_.idle())) spin_pause();
    lock.lock();
  }
  return true;
}

/// Sleeps until the loop has an event. A thread that adds work calls wake() to end the sleep. Returns false if another
/// thread has begun to drive the loop meanwhile.
bool LoopDriver::park(Lock& lock, Duration max_sleep) {
  if (loop_->poll()) return true;
  max_sleep = std::min(max_sleep, std::max(delegate_.next_deadline() - steady_clock().now(), Duration::zero()));
  parked_ = true;
  parked_until_ = steady_clock().now() + max_sleep;
  const bool own = driven_by_ == DrivenBy::kOwnThread;
  set_driver(driven_by_);
  if (!own) {
    wait_for_event(lock, max_sleep, own);
  } else {
    const uint64_t number = ++sleeps_;
    sleeper_ = Sleep{number, drives_, parked_until_, /*woken=*/false};
    wait_for_event(lock, max_sleep, own);
    if (!sleeper_ || sleeper_->number != number) return false;
    sleeper_.reset();
    if (driven_by_ != DrivenBy::kOwnThread) return false;
  }
  parked_ = false;
  set_driver(driven_by_);
  loop_->yield_soon();
  loop_->poll();
  delegate_.expire();
  return true;
}

void LoopDriver::wait_for_event(Lock& lock, Duration max_sleep, bool own) {
  lock.unlock();
  pollfd events[]{{loop_->descriptor(), POLLIN, 0}, {wake_up_.get(), POLLIN, 0}};
  const timespec timeout{static_cast<time_t>(max_sleep.count() / 1'000'000'000),
                         static_cast<long>(max_sleep.count() % 1'000'000'000)};
  (void)ppoll(events, own && wake_up_ ? 2 : 1, &timeout, nullptr);
  lock.lock();
  uint64_t count;
  if (events[1].revents != 0) (void)!::read(wake_up_.get(), &count, sizeof count);
}

void LoopDriver::run_callbacks(Lock& lock) {
  while (!callbacks_.empty()) {
    std::vector<std::function<void()>> callbacks;
    callbacks.swap(callbacks_);
    if (driven_by_ == DrivenBy::kNoThread && delegate_.has_work()) {
      on_own_thread() ? provide_standby() : provide_driver();
    }
    ++calling_;
    const LoopDriver* const outer = std::exchange(calling_for, this);
    lock.unlock();
    for (auto& callback : callbacks) callback();
    callbacks.clear();
    calling_for = outer;
    lock.lock();
    if (--calling_ == 0 && stopping_) changed_.notify_all();
  }
}

void LoopDriver::poll() {
  if (!is_free() || stopping_) return;
  if (++drives_ % kPollKernelEvery == 0) {
    loop_->poll();
  } else {
    loop_->run_pollers();
  }
}

void LoopDriver::provide_progress() {
  wake_in_time();
  provide_driver();
}

/// Wakes the thread that sleeps in the loop if there will be work before it wakes.
void LoopDriver::wake_in_time() {
  if (!parked_) return;
  const TimePoint now = steady_clock().now();
  const TimePoint needed = std::min(now + loop_->idle_time(kMaxSleep), delegate_.next_deadline());
  if (needed + kWakeSlack < parked_until_) wake();
}

/// Makes an own thread look for work soon, without waking the thread that sleeps in the loop.
void LoopDriver::provide_driver() {
  if (stopping_ || driven_by_ == DrivenBy::kOwnThread) return;
  if (threads_.empty()) {
    start_thread();
  } else if (standby_.is_asleep()) {
    alert();
  }
}

void LoopDriver::add_task(std::shared_ptr<Task> task) {
  tasks_.add(std::move(task));
  // After its callback, an own thread looks for tasks itself. If the callback takes long, the one that naps does.
  if (on_own_thread() && calling_for == this && !runs_task && standby_.is_napping()) return;
  threads_.empty() ? start_thread() : alert();
}

/// Makes an own thread look for tasks. One that drives the loop does so in each turn.
void LoopDriver::alert() {
  driven_by_ == DrivenBy::kOwnThread || !standby_.has_thread() ? wake_sleeper() : standby_.alert();
}

/// Called when an own thread starts a task or a callback: another one must stand by meanwhile.
void LoopDriver::provide_standby() {
  if (standby_.is_napping() || (sleeper_ && !tasks_.ready())) return;
  if (standby_.is_asleep()) return alert();
  if (!standby_.replace()) start_thread(true);
}

void LoopDriver::pause_task(bool paused) {
  paused ? tasks_.pause() : tasks_.resume();
  if (tasks_.ready()) alert();
}

void LoopDriver::start_thread(bool stands_by) {
  if (stopping_ || threads_.size() >= kMaxThreads) return;
  try {
    threads_.emplace_back([this, stands_by] { run_own_thread(stands_by); });
    if (stands_by) standby_.expect();
  } catch (const std::system_error& error) {
    log(LogLevel::kWarning,
        std::string("cannot start a thread; messages move only while a thread waits for one: ") + error.what());
  }
}

void LoopDriver::run_own_thread(bool stands_by) {
  own_thread_of = this;
  Lock lock(mutex_);
  Standby::Rest state;
  if (stands_by) {
    standby_.arrive();
  } else {
    while (!stopping_ && state.may_run && run_next_task(lock, state)) {
    }
  }
  while (!stopping_) {
    standby_.rest(lock, state);
    while (!stopping_ && state.may_run && (run_next_task(lock, state) || (state.may_drive && drive(lock)))) {
      state.naps = 0;
    }
  }
}

bool LoopDriver::run_next_task(Lock& lock, Standby::Rest& state) {
  if (!tasks_.ready()) return false;
  auto task = tasks_.start();
  const uint64_t number = tasks_.started();
  const bool serial = tasks_.last_is_serial();
  provide_standby();
  lock.unlock();
  runs_task = true;
  task->run();
  task = nullptr;  // its objects may take the lock when they are destroyed
  runs_task = false;
  lock.lock();
  tasks_.end();
  if (tasks_.unfinished() == 0 && stopping_) changed_.notify_all();
  if (serial && tasks_.started() != number) state.may_run = false;  // another thread makes progress, too
  return true;
}

/// Drives the loop if no other thread does. Returns false if there was nothing to do.
bool LoopDriver::drive(Lock& lock) {
  const auto not_needed = [this] { return stopping_ || waiting_ > 0 || !delegate_.has_work() || tasks_.ready(); };
  if (driven_by_ != DrivenBy::kNoThread || not_needed()) return false;
  set_driver(DrivenBy::kOwnThread);
  if (!take_turns(lock, not_needed, Deadline::never())) return driven_by_ == DrivenBy::kNoThread || tasks_.ready();
  set_driver(DrivenBy::kNoThread);
  changed_.notify_all();
  run_callbacks(lock);
  return true;
}

bool LoopDriver::stop(Lock& lock, const Deadline& deadline) {
  MUSTER_CHECK(!is_inside(), "a task or a callback must not stop the driver that runs it");
  stopping_ = true;
  wake();
  wake_sleeper();
  standby_.stop();
  run_callbacks(lock);
  while (driven_by_ != DrivenBy::kNoThread || waiting_ > 0 || !bystanders_.empty() || calling_ > 0 ||
         tasks_.unfinished() > 0) {
    if ((calling_ > 0 || tasks_.unfinished() > 0) && deadline.passed()) return false;
    changed_.wait_for(lock, std::clamp(deadline.left(), Duration(1ms), kMaxSleep));
  }
  if (std::exchange(stopped_, true)) return false;
  std::vector<std::thread> threads;
  threads.swap(threads_);
  auto dropped = tasks_.take_all();  // destroyed without the lock, which their objects may take
  lock.unlock();
  for (std::thread& thread : threads) thread.join();
  dropped.clear();
  lock.lock();
  return true;
}

}  // namespace muster
