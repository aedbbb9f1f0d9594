#include "muster/nccl/in_flight.h"

#include <utility>
#include <vector>

#include "muster/base/wait_policy.h"

namespace muster::nccl {
namespace {

/// How often the thread looks. Threads that wait look all the time.
constexpr Duration kInterval = 1ms;

void finish(InFlight::Entry& entry, const Result<>& result) {
  if (entry.ended) entry.ended(result);
  for (const auto& callback : entry.work->finish(result)) callback(result);
}

}  // namespace

InFlight::InFlight(std::function<Result<>()> check, Failed failed)
    : check_(std::move(check)), failed_(std::move(failed)) {}

InFlight::~InFlight() { stop(); }

Work InFlight::add(Entry entry, uint64_t sequence) {
  const auto state = entry.work;
  state->driver = shared_from_this();
  const std::lock_guard lock(mutex_);
  entries_.push_back(std::move(entry));
  if (!thread_.joinable() && !stopping_) thread_ = std::thread([this] { run(); });
  changed_.notify_all();
  return Work(state, sequence);
}

void InFlight::fail(const Error& why, const std::function<void()>& end_kernels) {
  std::unique_lock lock(mutex_);
  std::deque<Entry> entries = std::exchange(entries_, {});
  changed_.notify_all();
  lock.unlock();
  end_kernels();
  for (Entry& entry : entries) finish(entry, tl::unexpected(why.in(entry.describe())));
}

bool InFlight::wait_until_empty(const Deadline& deadline) {
  for (;;) {
    poll();
    std::unique_lock lock(mutex_);
    if (entries_.empty()) return true;
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
}

void InFlight::drive(Work::State& state, const Deadline& deadline) {
  PollWait wait(kMessagePolls);
  while (!deadline.passed()) {
    poll();
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
    if (entries_.empty()) {
      changed_.wait(lock);
      continue;
    }
    changed_.wait_for(lock, kInterval, [this] { return stopping_; });
    lock.unlock();
    poll();
    if (const auto why = find_failure()) fail(*why, [&] { failed_(*why); });
    lock.lock();
  }
}

void InFlight::poll() {
  std::vector<Entry> ended;
  {
    const std::lock_guard lock(mutex_);
    while (!entries_.empty() && entries_.front().event->reached()) {
      ended.push_back(std::move(entries_.front()));
      entries_.pop_front();
    }
    if (!ended.empty()) changed_.notify_all();
  }
  for (Entry& entry : ended) finish(entry, {});
}

std::optional<Error> InFlight::find_failure() {
  {
    const std::lock_guard lock(mutex_);
    if (entries_.empty()) return std::nullopt;
    if (steady_clock().now() >= entries_.front().deadline) {
      return Error{ErrorCode::kTimeout, "it has not ended on the device within its timeout"};
    }
  }
  if (const Result<> status = check_(); !status) return status.error();
  return std::nullopt;
}

}  // namespace muster::nccl
