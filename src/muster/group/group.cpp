#include "muster/group/group.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>

#include "muster/flight/recorder.h"
#include "muster/group/engine/collective_engine.h"
#include "muster/group/engine/fingerprint_check.h"
#include "muster/group/queue/call_queue.h"
#include "muster/group/shutdown_errors.h"

namespace muster {
namespace {

/// The flight recorders of a group: one for collectives and one for messages. Both are null if recording is turned off.
class GroupRecorders {
 public:
  GroupRecorders(const GroupSpec& spec, const CollectiveEngine& engine)
      : spec_(spec), engine_(engine), collectives_(create()) {}

  Recorder* collectives() const { return collectives_.get(); }
  /// Created at the first message, because most groups send no messages.
  Recorder* messages() {
    std::call_once(first_message_, [this] {
      if (collectives_) messages_ = create();
    });
    return messages_.get();
  }
  /// Records the end of a message that was submitted with `ticket`.
  Work record(Work message, Recorder::Ticket ticket) const {
    if (!messages_) return message;
    if (message.done()) {
      messages_->ended(ticket, message.result());
    } else {
      message.on_done([recorder = messages_, ticket](const Result<>& result) { recorder->ended(ticket, result); });
    }
    return message;
  }

 private:
  std::shared_ptr<Recorder> create() const {
    std::shared_ptr<Recorder> recorder = Recorder::create(spec_, Recorder::entries_from_environment());
    if (recorder) recorder->set_group(engine_.transport(), engine_.group_id());
    return recorder;
  }

  const GroupSpec& spec_;
  const CollectiveEngine& engine_;
  const std::shared_ptr<Recorder> collectives_;
  std::once_flag first_message_;
  std::shared_ptr<Recorder> messages_;  ///< shared with messages that may end later than the group
};

class GroupImpl final : public Group, private CallQueue::Executor {
 public:
  GroupImpl(std::unique_ptr<CollectiveEngine> engine, std::shared_ptr<P2pEngine> p2p, const GroupSpec& spec,
            const GroupOptions& options)
      : engine_(std::move(engine)),
        p2p_(std::move(p2p)),
        spec_(spec),
        options_(options),
        timeout_(options.timeout),
        recorders_(spec_, *engine_),
        calls_(*this, recorders_.collectives(), spec_.name) {}

  /// A forked child inherits the memory and the links of its parent's groups, but not their threads. In the child, the
  /// destructor would wait for these threads forever, or tell the peers that the parent has left. So an inherited group
  /// is never destroyed.
  static void operator delete(GroupImpl* group, std::destroying_delete_t) {
    if (group->inherited()) {
      // A list of inherited groups, so that leak checkers can reach them.
      static std::atomic<GroupImpl*> all_inherited = nullptr;
      group->next_inherited_ = all_inherited.exchange(group);
      return;
    }
    group->~GroupImpl();
    ::operator delete(group);
  }

  ~GroupImpl() override { leave(); }

  Work send(BufferView data, Rank to, uint32_t tag, const CallOptions& options) override {
    Recorder* const recorder = recorders_.messages();
    const auto ticket = recorder != nullptr ? recorder->sending(data, to, tag, current_call_site()) : 0;
    return recorders_.record(p2p_->send(std::move(data), to, tag, with_timeout(options)), ticket);
  }
  Work receive(BufferView data, Rank from, uint32_t tag, const CallOptions& options) override {
    Recorder* const recorder = recorders_.messages();
    const auto ticket = recorder != nullptr ? recorder->receiving(data, from, tag, current_call_site()) : 0;
    return recorders_.record(p2p_->receive(std::move(data), from, tag, with_timeout(options)), ticket);
  }

  void abort(Error why) override {
    if (inherited()) return;
    if (why.rank < 0 || why.rank >= spec_.size) why.rank = kNoRank;
    p2p_->abort(why);
    engine_->request_abort(why);
    calls_.close(std::move(why));
    p2p_->run_callbacks();
  }

  /// Pending operations get a short time to finish, because the peers take part in them.
  void leave() override {
    if (inherited()) return;
    p2p_->close();
    if (!wait_for_pending(Deadline::after(std::min(timeout(), kDrainTime)))) {
      engine_->request_abort(was_shut_down(spec_.name, spec_.rank));
    }
    calls_.close(engine_->leave_reason());
  }

  Result<> status() const override {
    auto error = calls_.first_error();
    return error ? tl::unexpected(std::move(*error)) : Result<>{};
  }
  Result<> wait_for_pending(const Deadline& deadline) override { return calls_.wait_for_pending(deadline); }
  void on_completion(CompletionHook hook) override { calls_.set_hook(std::move(hook)); }

  Result<> set_timeout(Duration timeout) override {
    if (timeout <= Duration::zero()) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("the timeout of group \"{}\" must be greater than zero, not {:g} s", spec_.name,
                              std::chrono::duration<double>(timeout).count()));
    }
    timeout_ = timeout;
    return {};
  }
  Duration timeout() const override { return timeout_; }
  const GroupOptions& options() const override { return options_; }
  const GroupSpec& membership() const override { return spec_; }
  uint64_t sequence() const override { return calls_.sequence(); }
  std::string transport() const override { return engine_->transport(); }
  std::shared_ptr<Arena> arena() const override { return engine_->arena(); }

 private:
  Work begin(Operation&& operation, const CallOptions& options) override {
    if (records_call_sites_) operation.site = current_call_site();
    return calls_.submit(std::move(operation), with_timeout(options).timeout, options.async);
  }

  // CallQueue::Executor
  Result<> run(const Operation& operation, Duration timeout) override {
    auto result = engine_->run(operation, Deadline::once_waiting(timeout));
    if (result) return result;
    Error& error = result.error();
    if (error.code == ErrorCode::kTimeout) {
      error.context += fmt::format(", after a timeout of {:g} s", std::chrono::duration<double>(timeout).count());
    }
    p2p_->abort(error);
    return result;
  }
  void shut_down(const Error& why) override { engine_->shut_down(why); }
  void run_callbacks() override { p2p_->run_callbacks(); }

  CallOptions with_timeout(CallOptions options) const {
    if (options.timeout <= Duration::zero()) options.timeout = timeout();
    return options;
  }

  bool inherited() const { return getpid() != process_; }

  const pid_t process_ = getpid();
  GroupImpl* next_inherited_ = nullptr;
  const std::unique_ptr<CollectiveEngine> engine_;
  const std::shared_ptr<P2pEngine> p2p_;
  const GroupSpec spec_;
  const GroupOptions options_;
  std::atomic<Duration> timeout_;
  GroupRecorders recorders_;
  const bool records_call_sites_ = recorders_.collectives() != nullptr || fingerprint_check_enabled();
  CallQueue calls_;
};

Result<> check_spec(const GroupSpec& spec) {
  if (spec.size >= 1 && spec.rank >= 0 && spec.rank < spec.size) return {};
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("rank {} of {}: a group needs a size of at least 1 and ranks from 0 to size - 1", spec.rank,
                          spec.size));
}

}  // namespace

Result<std::unique_ptr<Group>> Group::form(Store& store, const GroupSpec& asked, const GroupOptions& options) {
  MUSTER_TRY(check_spec(asked));
  GroupSpec spec = asked;
  const auto during = [&](const Error& error) {
    return tl::unexpected(error.in(fmt::format("forming group \"{}\" at rank {}", spec.name, spec.rank)));
  };
  const Deadline deadline = Deadline::after(options.timeout);
  auto mesh = form_mesh(store, spec, options, deadline);
  if (!mesh) return during(mesh.error());
  spec.name = mesh->name;
  const auto p2p = std::move(mesh->p2p);
  auto engine = CollectiveEngine::create(std::move(*mesh), spec, options.arena, deadline);
  if (!engine) return during(engine.error());
  auto group = std::make_unique<GroupImpl>(std::move(*engine), p2p, spec, options);
  p2p->on_failure([owner = group.get()](const Error& why) { owner->abort(why); });
  return group;
}

}  // namespace muster
