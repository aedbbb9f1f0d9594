#include "muster/group/group.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>

#include "muster/base/process_owned.h"
#include "muster/group/engine/collective_engine.h"
#include "muster/group/engine/fingerprint_check.h"
#include "muster/group/form/parent_exchange.h"
#include "muster/group/form/store_exchange.h"
#include "muster/group/operations.h"
#include "muster/group/queue/call_queue.h"
#include "muster/group/recorders.h"
#include "muster/group/shutdown_errors.h"

namespace muster {
namespace {

class GroupImpl final : public Group, public ProcessOwned<GroupImpl>, private CallQueue::Executor {
 public:
  GroupImpl(std::unique_ptr<CollectiveEngine> engine, std::shared_ptr<P2pEngine> p2p, const GroupSpec& spec,
            const GroupOptions& options)
      : engine_(std::move(engine)),
        p2p_(std::move(p2p)),
        spec_(spec),
        options_(options),
        timeout_(options.timeout),
        recorders_(spec_, engine_->transport(), engine_->group_id()),
        calls_(*this, recorders_.collectives(), spec_.name) {
    engine_->set_next([this] { return calls_.next(); });
  }

  ~GroupImpl() override { leave(); }

  Work send(BufferView data, Rank to, uint32_t tag, const CallOptions& options) override {
    const auto ticket = recorders_.sending(data, to, tag);
    return recorders_.record_end(p2p_->send(std::move(data), to, tag, with_timeout(options)), ticket);
  }
  Work receive(BufferView data, Rank from, uint32_t tag, const CallOptions& options) override {
    const auto ticket = recorders_.receiving(data, from, tag);
    return recorders_.record_end(p2p_->receive(std::move(data), from, tag, with_timeout(options)), ticket);
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
    MUSTER_TRY(check_timeout(timeout, spec_.name));
    timeout_ = timeout;
    return {};
  }
  Duration timeout() const override { return timeout_; }
  const GroupOptions& options() const override { return options_; }
  const GroupSpec& membership() const override { return spec_; }
  uint64_t id() const override { return engine_->group_id(); }
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

  const std::unique_ptr<CollectiveEngine> engine_;
  const std::shared_ptr<P2pEngine> p2p_;
  const GroupSpec spec_;
  const GroupOptions options_;
  std::atomic<Duration> timeout_;
  GroupRecorders recorders_;
  const bool records_call_sites_ = recorders_.collectives() != nullptr || fingerprint_check_enabled();
  CallQueue calls_;
};

/// Forms a group of the ranks that meet in `ranks`. All must have equal options.
Result<std::unique_ptr<Group>> form_over(RankExchange& ranks, const GroupOptions& options) {
  GroupSpec spec = ranks.spec();
  const auto during = [&](const Error& error) {
    return tl::unexpected(error.in(fmt::format("forming group \"{}\" at rank {}", spec.name, spec.rank)));
  };
  const Deadline deadline = Deadline::after(options.timeout);
  auto mesh = form_mesh(ranks, options, deadline);
  if (!mesh) return during(mesh.error());
  spec.name = mesh->name;
  const auto p2p = std::move(mesh->p2p);
  auto engine = CollectiveEngine::create(std::move(*mesh), spec, options.arena, deadline);
  if (!engine) return during(engine.error());
  auto group = std::make_unique<GroupImpl>(std::move(*engine), p2p, spec, options);
  p2p->on_failure([owner = group.get()](const Error& why) { owner->abort(why); });
  return group;
}

}  // namespace

Result<std::unique_ptr<Group>> Group::form(Store& store, const GroupSpec& asked, const GroupOptions& options) {
  if (asked.size < 1 || asked.rank < 0 || asked.rank >= asked.size) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("rank {} of {}: a group needs a size of at least 1 and ranks from 0 to size - 1",
                            asked.rank, asked.size));
  }
  StoreExchange ranks(store, asked);
  return form_over(ranks, options);
}

Result<std::unique_ptr<Group>> Group::form_duplicate(const GroupSpec& duplicate) {
  ParentExchange ranks(*this, duplicate);
  return form_over(ranks, inherited_options());
}

}  // namespace muster
