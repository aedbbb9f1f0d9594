#include "muster/io/standby.h"

#include <algorithm>
#include <utility>

namespace muster {
namespace {

/// After this many naps without work, the thread that stands by sleeps until it is alerted.
constexpr int kMaxIdleNaps = 50;
/// How long it naps while other threads drive the loop and no tasks begin, or while they run quick or serial tasks.
constexpr Duration kLongNap = 1ms;
/// For tasks that take less than this, another thread would cost more than it helps.
constexpr Duration kQuickTask = 6us;

}  // namespace

Standby::Standby(Duration nap, std::function<bool()> has_task, std::function<Activity()> activity)
    : nap_(nap), has_task_(std::move(has_task)), activity_(std::move(activity)) {}

void Standby::rest(Lock& lock, Rest& state) {
  while (has_thread() && !stopped_) {
    ++idle_;
    replace_.wait(lock, [this] { return stopped_ || replacing_; });
    --idle_;
    if (std::exchange(replacing_, false)) state_ = State::kNone;
    state = {};
  }
  if (state.naps == kMaxIdleNaps) {
    const bool alerted = wait_for_alert(lock, state.may_drive);
    state = {};
    if (!alerted || is_needed()) return;
  }
  state = nap(lock, state);
}

/// True if the thread was alerted. Then it naps once before it takes the loop.
bool Standby::wait_for_alert(Lock& lock, bool may_drive) {
  state_ = State::kAsleep;
  const auto alerted = [this] { return stopped_ || alerted_; };
  // A thread that uses the driver alerts this one from now on. One that used it during the last nap did not.
  if (!may_drive) {
    alert_.wait_for(lock, kLongNap, alerted);
  } else if (!has_task_()) {
    alert_.wait(lock, alerted);
  }
  state_ = State::kNone;
  return std::exchange(alerted_, false);
}

/// A thread that has just begun an operation usually waits for it soon, and then drives the loop itself. So this thread
/// naps before it takes the loop. While it naps, callers need not notify it, which keeps begin calls cheap.
Standby::Rest Standby::nap(Lock& lock, const Rest& before) {
  state_ = State::kNapping;
  const Activity begin = activity_();
  const Duration length = before.only_calls || !before.may_run ? std::max(kLongNap, nap_) : nap_;
  const bool alerted = alert_.wait_for(lock, length, [this] { return stopped_ || alerted_; });
  state_ = State::kNone;
  alerted_ = false;
  const Activity end = activity_();
  const auto tasks = static_cast<int64_t>(end.tasks - begin.tasks);
  const int64_t many = end.serial ? 1 : std::max<int64_t>(length / kQuickTask, 1);
  const bool may_drive = alerted || end.drives == begin.drives;
  // If a thread has driven the loop, and no task waits, another thread would find nothing to do.
  const bool quick = !alerted && (tasks >= many || (tasks > 0 && !may_drive && !has_task_()));
  return {.naps = quick ? 0 : before.naps + 1,
          .may_run = !quick,
          .may_drive = may_drive,
          .only_calls = !may_drive && tasks == 0};
}

void Standby::alert() {
  if (!std::exchange(alerted_, true)) alert_.notify_one();
}

bool Standby::replace() {
  if (idle_ == 0) return false;
  replacing_ = true;
  expect();
  replace_.notify_one();
  return true;
}

void Standby::stop() {
  stopped_ = true;
  alert_.notify_all();
  replace_.notify_all();
}

}  // namespace muster
