#include "muster/group/group.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "muster/base/check.h"
#include "muster/flight/recorder.h"
#include "muster/group/engine/collective_engine.h"
#include "muster/group/engine/fingerprint_check.h"
#include "muster/group/execution_lock.h"
#include "muster/group/shutdown_errors.h"
#include "muster/group/work_state.h"

namespace muster {
namespace {

/// Operations that may wait their turn; a caller this far ahead of its peers has a bug.
constexpr size_t kMaxQueued = 1 << 16;

class GroupImpl final : public Group {
 public:
  GroupImpl(std::unique_ptr<CollectiveEngine> engine, std::shared_ptr<P2pEngine> p2p, const GroupSpec& membership,
            const GroupOptions& options)
      : engine_(std::move(engine)),
        p2p_(std::move(p2p)),
        membership_(membership),
        options_(options),
        timeout_(options.timeout) {}

  /// A forked child that drops a group has its memory and its links, but not its threads. To end it there would wait
  /// for them for ever, or tell the peers that the parent has left; so it is left alone, as the parent's.
  static void operator delete(GroupImpl* group, std::destroying_delete_t) {
    if (group->inherited()) {
      static std::atomic<GroupImpl*> all_inherited = nullptr;  // reachable, or it would count as a leak
      group->next_inherited_ = all_inherited.exchange(group);
      return;
    }
    group->~GroupImpl();
    ::operator delete(group);
  }

  /// Not to be called by a callback of the group's own Work.
  ~GroupImpl() override {
    leave();
    std::unique_lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    while (!threads_.empty()) {  // one that calls back may still start another
      std::thread thread = std::move(threads_.back());
      threads_.pop_back();
      lock.unlock();
      MUSTER_CHECK(thread.get_id() != std::this_thread::get_id(), "a group is destroyed by a callback of its own work");
      thread.join();
      lock.lock();
    }
  }

  Work send(BufferView data, Rank to, uint32_t tag, const CallOptions& options) override {
    Recorder* const recorder = message_recorder();
    const auto ticket = recorder != nullptr ? recorder->sending(data, to, tag, current_call_site()) : 0;
    return recorded(p2p_->send(std::move(data), to, tag, within(options)), ticket);
  }
  Work receive(BufferView data, Rank from, uint32_t tag, const CallOptions& options) override {
    Recorder* const recorder = message_recorder();
    const auto ticket = recorder != nullptr ? recorder->receiving(data, from, tag, current_call_site()) : 0;
    return recorded(p2p_->receive(std::move(data), from, tag, within(options)), ticket);
  }

  void abort(Error why) override {
    if (inherited()) return;
    if (why.rank < 0 || why.rank >= membership_.size) why.rank = kNoRank;
    p2p_->abort(why);
    engine_->request_abort(why);
    end(std::move(why));
    p2p_->call_back();
  }

  /// What is queued may finish: the peers count on it.
  void leave() override {
    if (inherited()) return;
    p2p_->close();
    if (!wait_for_pending(Deadline::after(std::min(timeout(), kDrainTime)))) {
      engine_->request_abort(was_shut_down(membership_.name, membership_.rank));
    }
    end(engine_->farewell());
  }

  Result<> status() const override {
    const std::lock_guard lock(mutex_);
    if (first_error_) return tl::unexpected(*first_error_);
    return {};
  }

  Result<> wait_for_pending(const Deadline& deadline) override {
    std::unique_lock lock(mutex_);
    execution_lock_.require_slow_path();
    const uint64_t last = execution_lock_.numbers();
    ++waiting_for_all_;
    const bool ended = changed_.wait_for(lock, deadline.left(), [&] { return ended_ >= last || under_way() == 0; });
    --waiting_for_all_;
    if (ended) return {};
    return fail(ErrorCode::kTimeout, fmt::format("{} of the {} operations begun in group \"{}\" are still under way",
                                                 under_way(), execution_lock_.numbers(), membership_.name));
  }

  void on_completion(CompletionHook hook) override {
    auto shared = hook ? std::make_shared<const CompletionHook>(std::move(hook)) : nullptr;
    const std::lock_guard lock(mutex_);
    hook_.swap(shared);
    execution_lock_.require_slow_path();
  }

  Result<> set_timeout(Duration timeout) override {
    if (timeout <= Duration::zero()) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("the timeout of group \"{}\" must be greater than zero, not {:g} s", membership_.name,
                              std::chrono::duration<double>(timeout).count()));
    }
    timeout_ = timeout;
    return {};
  }
  Duration timeout() const override { return timeout_; }
  const GroupOptions& options() const override { return options_; }
  const GroupSpec& membership() const override { return membership_; }

  uint64_t sequence() const override { return execution_lock_.numbers(); }

  std::string transport() const override { return engine_->transport(); }
  std::shared_ptr<Arena> arena() const override { return engine_->arena(); }

 private:
  /// The completion hook, as it was when an operation was submitted, and what it is told. Shared, for it may be
  /// replaced meanwhile.
  struct Hooked {
    std::shared_ptr<const CompletionHook> hook;
    TimePoint submitted, started, ended;

    void stamp(TimePoint& time) const {
      if (hook) time = steady_clock().now();
    }
    void tell(const Call& call, const Result<>& result) const {
      if (hook) (*hook)(Finished{call, submitted, started, ended, result});
    }
  };

  /// An operation that is over, of which its hook has not been told.
  struct PendingHook {
    Hooked hooked;
    Call call;
    Result<> result;
  };

  struct Job {
    Operation operation;
    Duration timeout;
    std::shared_ptr<Work::State> work;
    Hooked hooked;
    Recorder::Ticket ticket = 0;
  };

  /// Null where it is turned off.
  std::shared_ptr<Recorder> make_recorder() const {
    std::shared_ptr<Recorder> recorder = Recorder::create(membership_, Recorder::entries_from_environment());
    if (recorder) recorder->set_group(engine_->transport(), engine_->group_id());
    return recorder;
  }

  /// From the first message on, as most groups have none.
  Recorder* message_recorder() {
    std::call_once(first_message_, [this] {
      if (recorder_) message_recorder_ = make_recorder();
    });
    return message_recorder_.get();
  }

  /// A message, as it was handed to the P2P engine.
  Work recorded(Work message, Recorder::Ticket ticket) const {
    if (!message_recorder_) return message;
    if (message.done()) {
      message_recorder_->ended(ticket, message.result());
    } else {
      message.on_done(
          [recorder = message_recorder_, ticket](const Result<>& result) { recorder->ended(ticket, result); });
    }
    return message;
  }

  /// With the lock held and demand() made: operations begun that are not over and told.
  size_t under_way() const {
    return queue_.size() + untold_.size() + (execution_lock_.taken() ? 1 : 0) + (telling_ ? 1 : 0);
  }

  /// Closes the links with `why`, now or when the call under way has ended.
  void end(Error why) {
    std::unique_lock lock(mutex_);
    if (!first_error_) first_error_ = why;
    if (!abort_) abort_ = std::move(why);
    execution_lock_.require_slow_path();
    if (execution_lock_.taken()) return;  // whoever runs a call sees the request, or end_turn() does
    execution_lock_.take();
    end_turn(lock);
  }

  CallOptions within(CallOptions options) const {
    if (options.timeout <= Duration::zero()) options.timeout = timeout();
    return options;
  }

  /// A sync call on an idle group runs right here, with no hand-over to another thread; all else queues.
  Work begin(Operation&& operation, const CallOptions& options) override {
    const Duration timeout = options.timeout > Duration::zero() ? options.timeout : this->timeout();
    if (notes_sites_) operation.site = current_call_site();
    if (!options.async) {
      operation.call.sequence = execution_lock_.take_if_idle();
      if (operation.call.sequence != 0) return run_here(operation, timeout, {});
    }
    std::unique_lock lock(mutex_);
    execution_lock_.require_slow_path();
    Hooked hooked{hook_, {}, {}, {}};
    hooked.stamp(hooked.submitted);
    if (!options.async && !execution_lock_.taken() && queue_.empty()) {
      execution_lock_.take();
      operation.call.sequence = execution_lock_.next_number();
      lock.unlock();
      return run_here(operation, timeout, std::move(hooked));
    }
    auto queued = enqueue({std::move(operation), timeout, std::make_shared<Work::State>(), std::move(hooked)});
    lock.unlock();
    if (!queued) return Work(tl::unexpected(queued.error()));
    changed_.notify_all();
    if (options.async) return std::move(*queued);
    return Work(queued->wait(), queued->sequence());
  }

  /// With the turn.
  Work run_here(const Operation& operation, Duration timeout, Hooked&& hooked) {
    hooked.stamp(hooked.started);
    auto result = run(operation, timeout, record(operation, Recorder::Start::kNow));
    hooked.stamp(hooked.ended);
    if (!execution_lock_.give_back_if_idle(operation.call.sequence)) {
      std::unique_lock lock(mutex_);
      ended(std::move(hooked), operation.call, result);
      end_turn(lock);
      tell(lock);
    }
    if (!result) p2p_->call_back();
    return Work(std::move(result), operation.call.sequence);
  }

  /// With the lock held. A call that is refused takes no number: the other ranks know nothing of it.
  Result<Work> enqueue(Job job) {
    if (queue_.size() >= kMaxQueued) {
      return fail(ErrorCode::kResourceExhausted,
                  fmt::format("{} operations are queued already, the first is {}; wait for some", kMaxQueued,
                              queue_.front().operation.call.to_string()));
    }
    MUSTER_TRY(provide_thread());
    job.operation.call.sequence = execution_lock_.next_number();
    job.ticket = record(job.operation, Recorder::Start::kLater);
    Work work(job.work, job.operation.call.sequence);
    queue_.push_back(std::move(job));
    return work;
  }

  /// With the lock or the turn, so that what is recorded is in the order of the numbers, but where threads compete.
  Recorder::Ticket record(const Operation& operation, Recorder::Start start) {
    return recorder_ ? recorder_->submitted(operation, start) : 0;
  }

  /// With the lock held: sees to it that a thread is there which is not within somebody's callback. Those may take
  /// long, or even wait for another operation of this group, as DDP's communication hooks do.
  Result<> provide_thread() {
    if (serving_ > 0) return {};
    try {
      threads_.emplace_back([this] { progress(); });
      ++serving_;
    } catch (const std::system_error& error) {
      return fail(ErrorCode::kResourceExhausted, fmt::format("cannot start a progress thread: {}", error.what()));
    }
    return {};
  }

  /// A progress thread: takes turns with callers that run inline, and with others of its kind.
  void progress() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return queue_.empty() ? stopping_ : !execution_lock_.taken(); });
      if (queue_.empty()) break;
      Job job = std::move(queue_.front());
      queue_.pop_front();
      execution_lock_.take();
      lock.unlock();
      if (recorder_) recorder_->started(job.ticket);
      job.hooked.stamp(job.hooked.started);
      const auto result = run(job.operation, job.timeout, job.ticket);
      job.hooked.stamp(job.hooked.ended);
      auto callbacks = job.work->finish(result);
      lock.lock();
      ended(std::move(job.hooked), job.operation.call, result);
      end_turn(lock);
      if (result && callbacks.empty() && (untold_.empty() || telling_)) continue;
      --serving_;
      // Without a thread for them, the queued calls wait until these callbacks are over.
      if (!queue_.empty()) (void)provide_thread();
      tell(lock);
      lock.unlock();
      if (!result) p2p_->call_back();
      for (const auto& callback : callbacks) callback(result);
      callbacks.clear();
      lock.lock();
      ++serving_;
    }
    --serving_;
  }

  /// With the lock and the turn held, so that hooks are told in the order of the calls.
  void ended(Hooked&& hooked, const Call& call, const Result<>& result) {
    if (!hooked.hook && untold_.empty() && !telling_) {
      ended_ = call.sequence;
    } else {
      untold_.push_back({std::move(hooked), call, result});
    }
  }

  /// With the lock held, which it lets go of meanwhile: one thread tells all hooks, one after the other.
  void tell(std::unique_lock<std::mutex>& lock) {
    if (telling_) return;
    telling_ = true;
    while (!untold_.empty()) {
      const PendingHook next = std::move(untold_.front());
      untold_.pop_front();
      lock.unlock();
      next.hooked.tell(next.call, next.result);
      lock.lock();
      ended_ = next.call.sequence;
      if (waiting_for_all_ > 0) changed_.notify_all();
    }
    telling_ = false;
  }

  /// With the turn. After a failure the caller gives the turn back and then has the P2P engine call back: callbacks of
  /// messages may make a collective, which waits for the turn.
  Result<> run(const Operation& operation, Duration timeout, Recorder::Ticket ticket) {
    auto result = engine_->run(operation, Deadline::once_waiting(timeout));
    if (recorder_) recorder_->ended(ticket, result);
    if (!result) {
      if (result.error().code == ErrorCode::kTimeout) {
        result.error().context +=
            fmt::format(", after a timeout of {:g} s", std::chrono::duration<double>(timeout).count());
      }
      {
        const std::lock_guard lock(mutex_);
        if (!first_error_) first_error_ = result.error();
      }
      p2p_->abort(result.error());
    }
    return result;
  }

  /// Gives the turn back; the caller holds it, and the lock. An abort that came too late for the call that ends here is
  /// still told to the peers.
  void end_turn(std::unique_lock<std::mutex>& lock) {
    if (abort_) {
      const Error why = *abort_;
      lock.unlock();
      engine_->die(why);
      lock.lock();
    }
    const bool awaited = !queue_.empty() || stopping_ || waiting_for_all_ > 0;
    execution_lock_.give_back(!awaited && untold_.empty() && !hook_ && !abort_);
    if (awaited) changed_.notify_all();
  }

  bool inherited() const { return getpid() != process_; }

  const pid_t process_ = getpid();
  GroupImpl* next_inherited_ = nullptr;
  const std::unique_ptr<CollectiveEngine> engine_;
  const std::shared_ptr<P2pEngine> p2p_;
  const GroupSpec membership_;
  const std::shared_ptr<Recorder> recorder_ = make_recorder();
  const bool notes_sites_ =
      recorder_ != nullptr || fingerprint_check_enabled();  ///< somebody reads where a call was made
  std::once_flag first_message_;
  std::shared_ptr<Recorder> message_recorder_;  ///< shared with messages that may end later than the group
  const GroupOptions options_;
  std::atomic<Duration> timeout_;
  ExecutionLock execution_lock_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> queue_;
  bool stopping_ = false;
  uint64_t ended_ = 0;  ///< the last operation that is over and told, of those that ended with the lock held
  std::deque<PendingHook> untold_;
  bool telling_ = false;     ///< somebody is within tell()
  int waiting_for_all_ = 0;  ///< callers within wait_for_pending()
  std::shared_ptr<const CompletionHook> hook_;
  std::optional<Error> first_error_, abort_;
  std::vector<std::thread> threads_;  ///< the first is started by the first call that queues; more are rarely needed
  size_t serving_ = 0;                ///< of them, neither within callbacks nor over
};

Result<> check_membership(const GroupSpec& membership) {
  if (membership.size >= 1 && membership.rank >= 0 && membership.rank < membership.size) return {};
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("rank {} of {}: a group needs a size of at least 1 and ranks from 0 to size - 1",
                          membership.rank, membership.size));
}

}  // namespace

Result<std::unique_ptr<Group>> Group::form(Store& store, const GroupSpec& asked, const GroupOptions& options) {
  MUSTER_TRY(check_membership(asked));
  GroupSpec membership = asked;
  const auto during = [&](const Error& error) {
    return tl::unexpected(error.in(fmt::format("forming group \"{}\" at rank {}", membership.name, membership.rank)));
  };
  const Deadline deadline = Deadline::after(options.timeout);
  auto mesh = form_mesh(store, membership, options, deadline);
  if (!mesh) return during(mesh.error());
  membership.name = mesh->name;
  const auto p2p = std::move(mesh->p2p);
  p2p->begin(std::move(mesh->places));
  auto engine = CollectiveEngine::create(std::move(*mesh), membership, options.arena, deadline);
  if (!engine) return during(engine.error());
  auto group = std::make_unique<GroupImpl>(std::move(*engine), p2p, membership, options);
  p2p->on_failure([owner = group.get()](const Error& why) { owner->abort(why); });
  return group;
}

}  // namespace muster
