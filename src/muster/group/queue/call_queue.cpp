#include "muster/group/queue/call_queue.h"

#include <fmt/format.h>

#include <algorithm>
#include <system_error>

#include "muster/base/check.h"
#include "muster/base/wait_policy.h"

namespace muster {
namespace {

/// The maximum number of queued operations. A caller with this many unfinished operations has a bug.
constexpr size_t kMaxQueued = 1 << 16;
constexpr auto kDestroyedByCallback = "a group must not be destroyed by a callback of its own Work";

}  // namespace

/// Lets threads that wait for an operation into the queue. Outlives it, because a wait may. Thread-safe.
class CallQueue::Waiters final : public WorkDriver {
 public:
  explicit Waiters(CallQueue& queue) : queue_(&queue) {}

  void drive(Work::State& state, const Deadline& deadline) override {
    {
      const std::lock_guard lock(mutex_);
      if (queue_ == nullptr) return;
      inside_.push_back(std::this_thread::get_id());
    }
    queue_->run_awaited(state, deadline);
    const std::lock_guard lock(mutex_);
    inside_.erase(std::find(inside_.begin(), inside_.end(), std::this_thread::get_id()));
    if (inside_.empty()) left_.notify_all();
  }
  /// Returns when no thread is in the queue. None will be from then on.
  void close() {
    Lock lock(mutex_);
    MUSTER_CHECK(std::find(inside_.begin(), inside_.end(), std::this_thread::get_id()) == inside_.end(),
                 kDestroyedByCallback);
    left_.wait(lock, [this] { return inside_.empty(); });
    queue_ = nullptr;
  }

 private:
  std::mutex mutex_;  ///< guards all fields below
  std::condition_variable left_;
  std::vector<std::thread::id> inside_;
  CallQueue* queue_;  ///< constant while a thread is inside
};

CallQueue::CallQueue(Executor& executor, Recorder* recorder, std::string group)
    : executor_(executor), recorder_(recorder), group_(std::move(group)), waiters_(std::make_shared<Waiters>(*this)) {}

CallQueue::~CallQueue() {
  waiters_->close();
  Lock lock(mutex_);
  state_ = State::kStopping;
  changed_.notify_all();
  while (!threads_.empty()) {  // a thread that runs callbacks may still start another thread
    std::thread thread = std::move(threads_.back());
    threads_.pop_back();
    lock.unlock();
    MUSTER_CHECK(thread.get_id() != std::this_thread::get_id(), kDestroyedByCallback);
    thread.join();
    lock.lock();
  }
}

Work CallQueue::submit(Operation&& operation, Duration timeout, bool async) {
  if (!async) {
    operation.call.sequence = execution_lock_.take_if_idle();
    if (operation.call.sequence != 0) return run_inline(operation, timeout, {});
  }
  Lock lock(mutex_);
  execution_lock_.require_slow_path();
  HookCall hook = hooks_.begin();
  if (!async && !execution_lock_.taken() && queue_.empty()) {
    execution_lock_.take();
    operation.call.sequence = execution_lock_.next_sequence();
    lock.unlock();
    return run_inline(operation, timeout, std::move(hook));
  }
  auto queued = enqueue({std::move(operation), timeout, std::make_shared<Work::State>(), std::move(hook)});
  const bool wakes = starts_.wakes();
  lock.unlock();
  if (!queued) return Work(tl::unexpected(queued.error()));
  if (wakes) changed_.notify_all();
  if (async) return std::move(*queued);
  return Work(queued->wait(), queued->sequence());
}

/// Runs the operation in the caller's thread. Requires the execution lock, and releases it.
Work CallQueue::run_inline(const Operation& operation, Duration timeout, HookCall&& hook) {
  hook.stamp(hook.started);
  auto result = run(operation, timeout, record(operation, Recorder::Start::kNow));
  hook.stamp(hook.ended);
  if (!execution_lock_.release_if_idle(operation.call.sequence)) {
    Lock lock(mutex_);
    hooks_.complete(std::move(hook), operation.call, result);
    release(lock);
    hooks_.run(lock, changed_);
  }
  if (!result) executor_.run_callbacks();
  return Work(std::move(result), operation.call.sequence);
}

/// Requires the mutex.
Result<Work> CallQueue::enqueue(Job job) {
  if (queue_.size() >= kMaxQueued) {
    return fail(ErrorCode::kResourceExhausted,
                fmt::format("{} operations are queued already, the first is {}; wait for some", kMaxQueued,
                            queue_.front().operation.call.to_string()));
  }
  MUSTER_TRY(provide_thread());
  job.operation.call.sequence = execution_lock_.next_sequence();
  job.ticket = record(job.operation, Recorder::Start::kLater);
  job.work->driver = waiters_;
  Work work(job.work, job.operation.call.sequence);
  queue_.push_back(std::move(job));
  next_.store(&queue_.front().operation, std::memory_order_release);
  starts_.queued(queue_.back().operation);
  return work;
}

/// Requires the mutex or the execution lock. So operations are recorded in the order of their sequence numbers, unless
/// several threads submit at the same time.
Recorder::Ticket CallQueue::record(const Operation& operation, Recorder::Start start) {
  return recorder_ != nullptr ? recorder_->submitted(operation, start) : 0;
}

/// Requires the mutex. Starts a progress thread if no thread is free: callbacks may take a long time, or wait for
/// another operation of this group, as DDP's communication hooks do.
Result<> CallQueue::provide_thread() {
  if (free_threads_ > 0) return {};
  try {
    threads_.emplace_back([this] { run_progress_thread(); });
    ++free_threads_;
  } catch (const std::system_error& error) {
    return fail(ErrorCode::kResourceExhausted, fmt::format("cannot start a progress thread: {}", error.what()));
  }
  return {};
}

void CallQueue::run_progress_thread() {
  take_short_slices();
  Lock lock(mutex_);
  for (;;) {
    starts_.wait(lock, changed_, [this](uint64_t last) {
      if (queue_.empty()) return state_ == State::kStopping;
      return !execution_lock_.taken() && queue_.front().operation.call.sequence <= last;
    });
    if (queue_.empty()) break;
    auto [result, callbacks] = run_first(lock);
    if (result && callbacks.empty() && (!hooks_.pending() || hooks_.running())) continue;
    --free_threads_;
    // The result is ignored: if no thread can be started, the queued calls wait until these callbacks return.
    if (!queue_.empty()) (void)provide_thread();
    hooks_.run(lock, changed_);
    lock.unlock();
    if (!result) executor_.run_callbacks();
    for (const auto& callback : callbacks) callback(result);
    callbacks.clear();
    lock.lock();
    ++free_threads_;
  }
  --free_threads_;
}

/// Runs the first queued operation. Requires the mutex, and a free execution lock. Releases the mutex while it runs.
/// Returns the callbacks, which must run without the mutex.
std::pair<Result<>, CallQueue::Callbacks> CallQueue::run_first(Lock& lock) {
  Job job = std::move(queue_.front());
  queue_.pop_front();
  next_.store(queue_.empty() ? nullptr : &queue_.front().operation, std::memory_order_release);
  if (queue_.empty()) starts_.drained();
  execution_lock_.take();
  lock.unlock();
  if (recorder_ != nullptr) recorder_->started(job.ticket);
  job.hook.stamp(job.hook.started);
  auto result = run(job.operation, job.timeout, job.ticket);
  job.hook.stamp(job.hook.ended);
  auto callbacks = job.work->finish(result);
  lock.lock();
  hooks_.complete(std::move(job.hook), job.operation.call, result);
  release(lock);
  return {std::move(result), std::move(callbacks)};
}

/// Runs the operation in the thread that waits for it, if it is the next one: the callbacks of other operations must
/// not run here. Nor must hooks, which may belong to other operations. Not if the wait has a deadline before that of
/// the operation, because an operation cannot be interrupted. A callback that throws ends the process, as on a progress
/// thread.
void CallQueue::run_awaited(const Work::State& state, const Deadline& deadline) noexcept {
  Lock lock(mutex_);
  if (queue_.empty()) return starts_.awaited();
  const Job& next = queue_.front();
  const bool fits = deadline.left() >= next.timeout && !next.hook.hook;
  if (fits) starts_.awaited();
  if (!fits || execution_lock_.taken() || next.work.get() != &state) {
    starts_.need_progress();
    return changed_.notify_all();
  }
  const auto [result, callbacks] = run_first(lock);
  hooks_.run(lock, changed_);
  lock.unlock();
  if (!result) executor_.run_callbacks();
  for (const auto& callback : callbacks) callback(result);
}

/// Requires the execution lock.
Result<> CallQueue::run(const Operation& operation, Duration timeout, Recorder::Ticket ticket) {
  auto result = executor_.run(operation, timeout);
  if (recorder_ != nullptr) recorder_->ended(ticket, result);
  if (!result) {
    const std::lock_guard lock(mutex_);
    if (!first_error_) first_error_ = result.error();
  }
  return result;
}

/// Releases the execution lock. Requires the lock and the mutex. If the queue was closed while the operation ran,
/// close() could not shut down the executor, so release() does it.
void CallQueue::release(Lock& lock) {
  if (state_ != State::kOpen && first_error_) {
    const Error why = *first_error_;
    lock.unlock();
    executor_.shut_down(why);
    lock.lock();
  }
  const bool awaited = (!queue_.empty() && starts_.wakes()) || state_ == State::kStopping || waiting_for_all_ > 0;
  execution_lock_.release(!awaited && queue_.empty() && !hooks_.pending() && !hooks_.has_hook() &&
                          state_ == State::kOpen);
  if (awaited) changed_.notify_all();
}

void CallQueue::close(Error why) {
  Lock lock(mutex_);
  if (!first_error_) first_error_ = std::move(why);
  if (state_ == State::kOpen) state_ = State::kClosed;
  execution_lock_.require_slow_path();
  if (execution_lock_.taken()) return;  // then the thread that holds the lock shuts down in release()
  execution_lock_.take();
  release(lock);
}

std::optional<Error> CallQueue::first_error() const {
  const std::lock_guard lock(mutex_);
  return first_error_;
}

/// The number of operations that have begun and whose hooks have not returned. Requires the mutex, and
/// require_slow_path() before.
size_t CallQueue::pending() const { return queue_.size() + hooks_.size() + (execution_lock_.taken() ? 1 : 0); }

Result<> CallQueue::wait_for_pending(const Deadline& deadline) {
  Lock lock(mutex_);
  execution_lock_.require_slow_path();
  const uint64_t last = execution_lock_.sequence();
  ++waiting_for_all_;
  starts_.need_progress();
  changed_.notify_all();
  const bool ended =
      changed_.wait_for(lock, deadline.left(), [&] { return hooks_.completed() >= last || pending() == 0; });
  --waiting_for_all_;
  if (ended) return {};
  return fail(ErrorCode::kTimeout, fmt::format("{} of the {} operations begun in group \"{}\" are still pending",
                                               pending(), execution_lock_.sequence(), group_));
}

void CallQueue::set_hook(CompletionHook hook) {
  std::shared_ptr<const CompletionHook> before;
  const std::lock_guard lock(mutex_);
  before = hooks_.set(std::move(hook));
  execution_lock_.require_slow_path();
}

}  // namespace muster
