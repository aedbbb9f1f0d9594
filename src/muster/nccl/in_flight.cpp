#include "muster/nccl/in_flight.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "muster/base/log.h"
#include "muster/base/wait_policy.h"

namespace muster::nccl {
namespace {

/// How often the thread looks. Threads that wait look all the time.
constexpr Duration kInterval = 1ms;
/// The same once no operation has been in flight for this time. Until then add() need not wake the thread.
constexpr Duration kIdleInterval = 100ms;
/// How long kernels may take to end once they are aborted.
constexpr Duration kAbortTime = 10s;

void note_begin(InFlight::Entry& entry) {
  if (std::exchange(entry.begins, nullptr) != nullptr) entry.begun();
}

bool has_ended(Device::Event& event) {
  try {
    return event.reached();
  } catch (const std::exception&) {
    return true;  // the device has failed
  }
}

}  // namespace

InFlight::InFlight(Check check, Failed failed) : check_(std::move(check)), failed_(std::move(failed)) {}

void InFlight::start() {
  thread_ = std::thread([this] { run(); });
}

InFlight::~InFlight() { stop(); }

Work InFlight::add(Entry entry, uint64_t sequence) {
  const auto state = entry.work;
  state->driver = shared_from_this();
  std::unique_lock lock(mutex_);
  entries_.push_back(std::move(entry));
  if (const auto why = failure_) {  // between the launch of this operation and now
    lock.unlock();
    fail(*why, [&] { failed_(*why); });
    return Work(state, sequence);
  }
  if (std::exchange(idle_, false)) wake_.notify_one();
  return Work(state, sequence);
}

void InFlight::fail(const Error& why, const std::function<void()>& end_kernels) {
  std::unique_lock lock(mutex_);
  std::deque<Entry> entries = std::exchange(entries_, {});
  if (!failure_) failure_ = why;
  const Error first = *failure_;
  ++finishing_;
  lock.unlock();
  end_kernels();
  // NCCL tells kernels to end, and does not wait for that.
  const Deadline deadline = Deadline::after(kAbortTime);
  for (const Entry& each : entries) {
    while (!has_ended(*each.event) && !deadline.passed()) std::this_thread::yield();
  }
  finish_all(entries, tl::unexpected(first));
}

Result<> InFlight::status() const {
  const std::lock_guard lock(mutex_);
  return failure_ ? tl::unexpected(*failure_) : Result<>{};
}

void InFlight::finish_all(std::deque<Entry>& entries, const Result<>& result) {
  for (Entry& entry : entries) {
    const Result<> own = result ? result : tl::unexpected(result.error().in(entry.describe()));
    try {
      entry.ended(own);
      for (const auto& callback : entry.work->finish(own)) callback(own);
    } catch (const std::exception& error) {
      log(LogLevel::kError, fmt::format("a callback of {} failed: {}", entry.describe(), error.what()));
    }
  }
  const std::lock_guard lock(mutex_);
  --finishing_;
  finished_.notify_all();
}

bool InFlight::wait_until_empty(const Deadline& deadline) {
  for (;;) {
    look();
    std::unique_lock lock(mutex_);
    if (entries_.empty() && finishing_ == 0) return true;
    if (deadline.passed()) return false;
    finished_.wait_for(lock, kInterval);
  }
}

void InFlight::stop() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  wake_.notify_one();
  std::thread thread = std::move(thread_);
  lock.unlock();
  if (thread.joinable()) thread.join();
  lock.lock();
  finished_.wait(lock, [this] { return finishing_ == 0 && !looking_; });
}

/// Also looks for failures: a callback that waits for another operation holds up the thread.
void InFlight::drive(Work::State& state, const Deadline& deadline) {
  PollWait wait(kMessagePolls);
  Deadline next_look = Deadline::after(kInterval);
  while (!deadline.passed()) {
    (void)poll();
    {
      const std::lock_guard lock(state.mutex);
      if (state.finished) return;
    }
    if (next_look.passed()) {
      look();
      next_look = Deadline::after(kInterval);
    }
    if (!wait.idle()) spin_pause();
  }
}

void InFlight::run() {
  Deadline idle_from = Deadline::after(kIdleInterval);
  std::unique_lock lock(mutex_);
  while (!stopping_ && !failure_) {
    idle_ = entries_.empty() && idle_from.passed();
    const bool was_idle = idle_;
    wake_.wait_for(lock, idle_ ? kIdleInterval : kInterval, [&] { return stopping_ || idle_ != was_idle; });
    if (stopping_) return;
    if (!entries_.empty() || idle_ != was_idle) idle_from = Deadline::after(kIdleInterval);
    lock.unlock();
    look();
    lock.lock();
  }
}

void InFlight::look() {
  Result<> found = poll();  // first: it may run a callback that waits, and then this thread is in look() again
  {
    const std::lock_guard lock(mutex_);
    if (looking_ || stopping_ || failure_) return;
    looking_ = true;
  }
  if (found) found = check_(load());
  if (!found) fail(found.error(), [&] { failed_(found.error()); });
  const std::lock_guard lock(mutex_);
  looking_ = false;
  finished_.notify_all();
}

Result<> InFlight::poll() {
  std::deque<Entry> ended;
  const Result<> device = take_ended(ended);
  if (!ended.empty()) finish_all(ended, {});
  return device;
}

/// Increments finishing_ if it takes one.
Result<> InFlight::take_ended(std::deque<Entry>& ended) {
  const std::lock_guard lock(mutex_);
  Result<> device;
  try {
    for (Entry& each : entries_) {
      if (each.begins == nullptr) continue;
      if (!each.begins->reached()) break;
      note_begin(each);
    }
    while (!entries_.empty() && entries_.front().event->reached()) {
      note_begin(entries_.front());
      ended.push_back(std::move(entries_.front()));
      entries_.pop_front();
    }
  } catch (const std::exception& error) {
    device = muster::fail(ErrorCode::kIo, fmt::format("the device has failed: {}", error.what()));
  }
  if (!ended.empty()) ++finishing_;
  return device;
}

InFlight::Load InFlight::load() const {
  const std::lock_guard lock(mutex_);
  const TimePoint now = steady_clock().now();
  const bool overdue = std::ranges::any_of(entries_, [&](const Entry& each) { return each.deadline <= now; });
  return overdue ? Load::kOverdue : entries_.empty() ? Load::kNone : Load::kInTime;
}

}  // namespace muster::nccl
