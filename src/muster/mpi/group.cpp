#include "muster/mpi/group.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "muster/base/hash.h"
#include "muster/base/process_owned.h"
#include "muster/base/random.h"
#include "muster/group/engine/scaling.h"
#include "muster/group/operations.h"
#include "muster/group/queue/call_queue.h"
#include "muster/group/recorders.h"
#include "muster/group/shutdown_errors.h"
#include "muster/mpi/collectives.h"
#include "muster/mpi/device.h"
#include "muster/mpi/messages.h"
#include "muster/mpi/watchdog.h"
#include "muster/mpi/world.h"

namespace muster::mpi {
namespace {

/// How long pending operations may take to end when their group is left or aborted.
constexpr Duration kEndTime = 10s;

/// Two communicators of the same ranks, so that messages and collectives need no common order.
class Communicators {
 public:
  Communicators(const World& world, Handle collectives_comm, Handle messages_comm)
      : collectives(collectives_comm), messages(messages_comm), world_(world) {}
  ~Communicators() {
    if (failed || !world_.is_running()) return;
    for (Handle comm : {collectives, messages}) (void)world_.mpi.Comm_free(&comm);
  }
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;

  const Handle collectives, messages;
  std::atomic<bool> failed = false;  ///< MPI may still have memory of their calls

 private:
  const World& world_;
};

class MpiGroup final : public Group, public ProcessOwned<MpiGroup>, private CallQueue::Executor {
 public:
  MpiGroup(const World& world, std::unique_ptr<Communicators> comms, GroupSpec spec, std::vector<Rank> world_ranks,
           uint64_t id, GroupOptions options)
      : world_(world),
        comms_(std::move(comms)),
        spec_(std::move(spec)),
        world_ranks_(std::move(world_ranks)),
        id_(id),
        options_(std::move(options)),
        timeout_(options_.timeout),
        recorders_(spec_, "mpi", id),
        messages_(std::make_shared<Messages>(world, comms_->messages, spec_.size)),
        watchdog_(world),
        calls_(*this, recorders_.collectives(), spec_.name) {}

  ~MpiGroup() override {
    leave();
    messages_->stop();
  }

  Work send(BufferView data, Rank to, uint32_t tag, const CallOptions& options) override {
    const auto ticket = recorders_.sending(data, to, tag);
    return recorders_.record_end(messages_->send(std::move(data), to, tag, timeout_of(options)), ticket);
  }
  Work receive(BufferView data, Rank from, uint32_t tag, const CallOptions& options) override {
    const auto ticket = recorders_.receiving(data, from, tag);
    return recorders_.record_end(messages_->receive(std::move(data), from, tag, timeout_of(options)), ticket);
  }

  void abort(Error why) override {
    if (inherited()) return;
    if (why.rank < 0 || why.rank >= spec_.size) why.rank = kNoRank;
    note_failure();
    messages_->close(why, kEndTime);
    calls_.close(why);
    watchdog_.shorten_deadline(kEndTime, fmt::format("the group was aborted: {}", why.to_string()));
  }

  void leave() override {
    if (inherited()) return;
    const Error left = was_shut_down(spec_.name, spec_.rank);
    (void)calls_.wait_for_pending(Deadline::after(std::min(timeout(), kEndTime)));
    messages_->close(left, kEndTime);
    calls_.close(left);
    watchdog_.shorten_deadline(Duration::zero(), left.to_string());
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
  uint64_t id() const override { return id_; }
  uint64_t sequence() const override { return calls_.sequence(); }
  std::string transport() const override { return "mpi"; }
  bool takes_device_memory(std::string_view type, int index, const ExchangeDevice& exchange) const override {
    return world_.mpi.takes_device_memory(type) && use_device(type, index, exchange);
  }
  std::shared_ptr<Arena> arena() const override { return nullptr; }

 private:
  Work begin(Operation&& operation, const CallOptions& options) override {
    if (const Result<> fits = check_size(operation); !fits) {
      const Error why = fits.error().in(operation.reported_call().to_string());
      const bool uneven = operation.call.collective == Collective::kAllToAll && !operation.counts.empty();
      if (uneven && spec_.size > 1) world_.abort(why.to_string());  // the others may be in the call
      return Work(tl::unexpected(why));
    }
    if (recorders_.collectives() != nullptr) operation.site = current_call_site();
    return calls_.submit(std::move(operation), timeout_of(options), options.async);
  }

  Result<std::unique_ptr<Group>> form_child(Store& /*store*/, const std::vector<Rank>& ranks,
                                            const GroupSpec& child) override {
    std::vector<Rank> members;
    for (const Rank rank : ranks) members.push_back(world_ranks_[static_cast<size_t>(rank)]);
    return form_group(members, child.name, inherited_options());
  }
  Result<std::unique_ptr<Group>> form_duplicate(const GroupSpec& duplicate) override {
    return form_group(world_ranks_, duplicate.name, inherited_options());
  }
  Result<std::unique_ptr<Group>> form_merged(Store& /*store*/, const GroupSpec& /*spec*/) override {
    return fail(ErrorCode::kUnsupported, "a group over MPI cannot be merged: MPI knows the ranks of the job only");
  }

  // CallQueue::Executor
  Result<> run(const Operation& operation, Duration timeout) override {
    if (closed_) return tl::unexpected(*closed_);
    const auto describe = [&operation] { return operation.reported_call().to_string(); };
    const Watchdog::Guard guard(watchdog_, timeout, describe);
    const double factor = input_factor(operation, spec_.size);
    Bytes copy;
    MUSTER_TRY(operation.wait_for_input(operation.input.bytes(), Deadline::after(timeout)));
    const Result<> done =
        factor == 1 ? run_on_mpi(operation) : run_on_mpi(scale_input(operation, factor, spec_.rank, copy));
    if (!done) {
      note_failure();
      closed_ = done.error().in(fmt::format("{}, group \"{}\"", describe(), spec_.name));
      return tl::unexpected(*closed_);
    }
    finish_average(operation, factor, spec_.size, spec_.rank);
    return {};
  }
  void note_failure() {
    comms_->failed = true;
    World::expect_failures();
  }
  Result<> run_on_mpi(const Operation& operation) const {
    const CurrentDevice device;
    return run_collective(world_.mpi, comms_->collectives, spec_.rank, operation);
  }
  void shut_down(const Error& why) override {
    if (!closed_) closed_ = why;
  }
  /// After a collective has failed.
  void run_callbacks() override { messages_->close(calls_.first_error().value(), kEndTime); }

  Duration timeout_of(const CallOptions& options) const {
    return options.timeout > Duration::zero() ? options.timeout : timeout();
  }

  const World& world_;
  const std::unique_ptr<Communicators> comms_;
  const GroupSpec spec_;
  const std::vector<Rank> world_ranks_;
  const uint64_t id_;
  const GroupOptions options_;
  std::atomic<Duration> timeout_;
  GroupRecorders recorders_;
  const std::shared_ptr<Messages> messages_;
  Watchdog watchdog_;
  std::optional<Error> closed_;  ///< why later calls fail; only calls_ uses it
  CallQueue calls_;
};

Result<> check_members(const World& world, const std::vector<Rank>& ranks) {
  std::set<Rank> seen;
  for (const Rank rank : ranks) {
    if (rank < 0 || rank >= world.size || !seen.insert(rank).second) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("rank {} is listed twice or is not a rank of MPI, which has {}", rank, world.size));
    }
  }
  if (seen.contains(world.rank)) return {};
  return fail(ErrorCode::kInvalidArgument, fmt::format("this rank of MPI, {}, is not in the group", world.rank));
}

Result<std::unique_ptr<Communicators>> create_communicators(const World& world, const std::vector<Rank>& ranks,
                                                            const std::string& name) {
  const Library& mpi = world.mpi;
  Handle all = nullptr, members = nullptr, collectives = nullptr, messages = nullptr;
  MUSTER_TRY(mpi.check(mpi.Comm_group(mpi.comm_world, &all), "MPI_Comm_group"));
  MUSTER_TRY(mpi.check(mpi.Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &members), "MPI_Group_incl"));
  // Only the members take part. The tag keeps groups apart that form at the same time.
  const int tag = static_cast<int>(fnv1a(name) & 0x7fff);
  const int code = mpi.Comm_create_group(mpi.comm_world, members, tag, &collectives);
  (void)mpi.Group_free(&members);
  (void)mpi.Group_free(&all);
  MUSTER_TRY(mpi.check(code, "MPI_Comm_create_group"));
  MUSTER_TRY(mpi.check(mpi.Comm_set_errhandler(collectives, mpi.errors_return), "MPI_Comm_set_errhandler"));
  MUSTER_TRY(mpi.check(mpi.Comm_dup(collectives, &messages), "MPI_Comm_dup"));
  MUSTER_TRY(mpi.check(mpi.Comm_set_errhandler(messages, mpi.errors_return), "MPI_Comm_set_errhandler"));
  return std::make_unique<Communicators>(world, collectives, messages);
}

}  // namespace

Result<Position> position() {
  MUSTER_ASSIGN(const World* const world, World::get());
  return Position{world->rank, world->size, world->mpi.version()};
}

Result<std::unique_ptr<Group>> form_group(const std::vector<Rank>& world_ranks, const std::string& name,
                                          const GroupOptions& options) {
  MUSTER_ASSIGN(const World* const world, World::get());
  MUSTER_TRY(check_members(*world, world_ranks));
  const auto rank = std::ranges::find(world_ranks, world->rank) - world_ranks.begin();
  const GroupSpec spec{static_cast<Rank>(rank), static_cast<int>(world_ranks.size()), name, 0};
  Watchdog watchdog(*world);
  const auto describe = [&] { return fmt::format("forming group \"{}\" over {}", name, world->mpi.version()); };
  const Watchdog::Guard guard(watchdog, options.timeout, describe);
  const CurrentDevice device;  // any call of MPI may move pending messages
  MUSTER_ASSIGN(auto comms, create_communicators(*world, world_ranks, name));
  uint64_t id = 0;
  fill_secure_random({reinterpret_cast<uint8_t*>(&id), sizeof id});
  MUSTER_TRY(world->mpi.check(world->mpi.Bcast(&id, 1, world->mpi.uint64, 0, comms->collectives), "MPI_Bcast"));
  return std::make_unique<MpiGroup>(*world, std::move(comms), spec, world_ranks, id, options);
}

void abort_job(const std::string& why) {
  if (const World* const world = World::current(); world != nullptr) world->abort(why);
}

}  // namespace muster::mpi
