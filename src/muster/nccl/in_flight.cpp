#include "muster/nccl/in_flight.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "muster/base/wait_policy.h"

namespace muster::nccl {
namespace {

/// How often the thread looks. Threads that wait look all the time.
constexpr Duration kInterval = 1ms;
/// The same while it looks for failures only.
constexpr Duration kWatchInterval = 100ms;
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

InFlight::InFlight(std::function<Result<>()> check, Failed failed)
    : check_(std::move(check)), failed_(std::move(failed)) {}

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
  start_thread();
  return Work(state, sequence);
}

void InFlight::watch() {
  const std::lock_guard lock(mutex_);
  watching_ = true;
  start_thread();
}

void InFlight::start_thread() {
  if (!thread_.joinable() && !stopping_) thread_ = std::thread([this] { run(); });
  changed_.notify_all();
}

void InFlight::fail(const Error& why, const std::function<void()>& end_kernels) {
  std::unique_lock lock(mutex_);
  std::deque<Entry> entries = std::exchange(entries_, {});
  if (!failure_) failure_ = why;
  ++finishing_;
  lock.unlock();
  end_kernels();
  // NCCL tells kernels to end, and does not wait for that.
  const Deadline deadline = Deadline::after(kAbortTime);
  for (const Entry& each : entries) {
    while (!has_ended(*each.event) && !deadline.passed()) std::this_thread::yield();
  }
  finish_all(entries, why);
}

void InFlight::finish_all(std::deque<Entry>& entries, const std::optional<Error>& why) {
  for (Entry& entry : entries) {
    const Result<> result = why ? tl::unexpected(why->in(entry.describe())) : Result<>{};
    entry.ended(result);
    for (const auto& callback : entry.work->finish(result)) callback(result);
  }
  const std::lock_guard lock(mutex_);
  --finishing_;
  changed_.notify_all();
}

bool InFlight::wait_until_empty(const Deadline& deadline) {
  for (;;) {
    poll();
    std::unique_lock lock(mutex_);
    if (entries_.empty() && finishing_ == 0) return true;
    if (deadline.passed()) return false;
    changed_.wait_for(lock, kInterval);
  }
}

void InFlight::stop() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  std::thread thread = std::move(thread_);
  lock.unlock();
  if (thread.joinable()) thread.join();
  lock.lock();
  changed_.wait(lock, [this] { return finishing_ == 0; });
}

void InFlight::drive(Work::State& state, const Deadline& deadline) {
  PollWait wait(kMessagePolls);
  while (!deadline.passed()) {
    try {
      poll();
    } catch (const std::exception&) {
      return;  // an error of the device: the other thread finds it, too
    }
    {
      const std::lock_guard lock(state.mutex);
      if (state.finished) return;
    }
    if (!wait.idle()) spin_pause();
  }
}

void InFlight::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (entries_.empty() && (!watching_ || failure_)) {
      changed_.wait(lock);
      continue;
    }
    const bool was_empty = entries_.empty();
    changed_.wait_for(lock, was_empty ? kWatchInterval : kInterval,
                      [&] { return stopping_ || entries_.empty() != was_empty; });
    lock.unlock();
    std::optional<Error> why;
    try {
      poll();
      why = find_failure();
    } catch (const std::exception& error) {
      why = Error{ErrorCode::kIo, std::string("the device has failed: ") + error.what()};
    }
    if (why) fail(*why, [&] { failed_(*why); });
    lock.lock();
  }
}

void InFlight::poll() {
  std::deque<Entry> ended;
  {
    const std::lock_guard lock(mutex_);
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
    if (ended.empty()) return;
    ++finishing_;
  }
  finish_all(ended, std::nullopt);
}

std::optional<Error> InFlight::find_failure() {
  {
    const std::lock_guard lock(mutex_);
    if (entries_.empty() && !watching_) return std::nullopt;
    const auto first = std::ranges::min_element(entries_, {}, &Entry::deadline);
    if (first != entries_.end() && steady_clock().now() >= first->deadline) {
      return Error{ErrorCode::kTimeout, "it has not ended on the device within its timeout"};
    }
  }
  if (const Result<> status = check_(); !status) return status.error();
  return std::nullopt;
}

}  // namespace muster::nccl
