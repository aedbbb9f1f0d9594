#include "muster/group/runner.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <set>

#include "muster/collective/reduce.h"
#include "muster/collective/schedule.h"
#include "muster/collective/team_collectives.h"

namespace muster {
namespace {

/// How long peers may take, after a deadline was missed, to show that they are alive. A peer that can't read a ping,
/// being stuck in the middle of a frame, pings for itself once its own deadline has passed.
constexpr Duration kSignOfLife = std::chrono::seconds(2);
/// How long they may take to read why the group died.
constexpr Duration kLastWords = std::chrono::milliseconds(500);

}  // namespace

Result<std::unique_ptr<Runner>> Runner::create(Mesh mesh, const Membership& membership) {
  std::unique_ptr<Runner> runner(new Runner(std::move(mesh), membership));
  Runner* self = runner.get();
  if (self->mesh_.team_memory) {
    MUSTER_ASSIGN(self->team_, Team::attach(self->mesh_.team_memory, membership.rank, membership.size,
                                            [self](Rank awaited) { return self->watch(awaited); }));
    self->watch_processes();
  }
  return runner;
}

Runner::Runner(Mesh mesh, const Membership& membership)
    : membership_(membership), mesh_(std::move(mesh)), closed_(mesh_.links.size()) {
  for (const auto& link : mesh_.links) links_.push_back(link.get());
  watch_links();
}

Runner::~Runner() {
  die(Error{ErrorCode::kLeft,
            fmt::format("{} has left the group", mesh_.members[membership_.rank].to_string()),
            membership_.rank,
            {}});
}

void Runner::watch_links() {
  for (Link* link : links_) {
    if (link == nullptr) continue;
    const Rank rank = link->peer().rank;
    link->on_close([this, rank](const Error& why) { lost(rank, why); });
  }
}

/// A process that was forked by a peer, as data loaders are, keeps the peer's sockets open beyond its death. In a team
/// the kernel tells of the death itself.
void Runner::watch_processes() {
  const Member& self = mesh_.members[membership_.rank];
  for (const Member& member : mesh_.members) {
    if (member.process_domain == 0 || member.process_domain != self.process_domain || member.pid == self.pid) continue;
    Fd process(static_cast<int>(syscall(SYS_pidfd_open, member.pid, 0)));
    if (!process) continue;  // an old kernel, or gone already: then its links say so
    const int fd = process.get();
    const auto watched = mesh_.loop->watch(fd, EPOLLIN, [this, fd, rank = member.rank](uint32_t) {
      mesh_.loop->unwatch(fd);
      // What its link still has to say comes first: it may have left in order.
      mesh_.loop->after(kLastWords, [this, rank] {
        if (closed_[rank]) return;
        lost(rank, Error{ErrorCode::kPeerLost, mesh_.members[rank].to_string() + " died", rank, {}});
      });
    });
    if (watched) processes_.push_back(std::move(process));
  }
}

void Runner::lost(Rank rank, const Error& why) {
  closed_[rank] = why;
  // A peer that left may have done its part of what runs here; any other end is everybody's.
  if (why.code != ErrorCode::kLeft && !fatal_) fatal_ = why;
}

Result<> Runner::run(const Operation& operation, const Deadline& deadline) {
  if (!fatal_) {
    auto result = dispatch(operation, deadline);
    if (result) return result;
    const Error error = blame(std::move(result.error()), operation.call);
    die(error);
    return tl::unexpected(error);
  }
  Error error = *fatal_;
  die(error);  // a link may have ended between calls: the others learn the reason now
  error.message = "the group has failed: " + error.message;
  return tl::unexpected(error.in(operation.call.to_string()));
}

Result<> Runner::dispatch(const Operation& operation, const Deadline& deadline) {
  if (abort_flag_.load(std::memory_order_acquire)) return tl::unexpected(*abort_requested());
  if (membership_.size == 1) {
    operation.input.visit(0, operation.input.bytes(),
                          [&, offset = size_t{0}](const uint8_t* from, size_t bytes) mutable {
                            if (from != operation.output.at(offset, bytes).data)
                              operation.output.write(offset, from, bytes);
                            offset += bytes;
                          });
    return {};
  }
  return team_ ? run_in_team(*team_, operation, deadline) : run_schedule(operation, deadline);
}

Result<> Runner::run_schedule(const Operation& operation, const Deadline& deadline) {
  const Call& call = operation.call;
  Problem problem;
  problem.collective = call.collective;
  problem.rank = membership_.rank;
  problem.size = membership_.size;
  problem.count = call.count;
  problem.element_bytes = size_of(call.dtype);
  problem.root = call.root;
  problem.counts = operation.counts;
  problem.receive_counts = operation.receive_counts;
  MUSTER_ASSIGN(const Schedule schedule, plan(problem));
  if (scratch_.size() < schedule.scratch_bytes) scratch_.resize(schedule.scratch_bytes);

  std::optional<Result<>> outcome;
  Execution execution(schedule, links_, Buffers{operation.input, operation.output, call.op}, scratch_,
                      [&](Result<> result) { outcome = std::move(result); });
  execution.start();
  const auto finished = [&] { return outcome.has_value() || abort_flag_.load(std::memory_order_acquire); };
  const auto waited = mesh_.loop->run_until(finished, deadline);
  if (outcome && *outcome) {
    if (reduces(call.collective) && call.op == ReduceOp::kAverage) {
      operation.output.visit(0, operation.output.bytes(), [&](uint8_t* data, size_t bytes) {
        divide_by(data, bytes / size_of(call.dtype), call.dtype, membership_.size);
      });
    }
    return {};
  }
  Error error = outcome ? outcome->error() : waited ? *abort_requested() : missed(execution);
  error = blame(std::move(error), call);
  die(error);  // the execution's buffers may be dropped only once its links are closed
  return tl::unexpected(error);
}

/// The error of a missed deadline. Whom this rank waits for may itself be waiting for the culprit: that is one who
/// gives no sign of life, being stopped or not in the call at all. (Or one whose answer is stuck behind data that this
/// rank does not take yet: so those that it waits for come first.) When all are alive, the calls themselves must
/// differ.
Error Runner::missed(const Execution& execution) {
  const std::vector<Rank> silent = silent_peers();
  if (fatal_) return *fatal_;  // meanwhile a peer has found out, or died
  const std::vector<Rank> awaited = execution.waiting_for();
  for (const Rank rank : awaited) {
    if (closed_[rank]) return *closed_[rank];
  }
  std::vector<Rank> culprits;
  std::set_intersection(silent.begin(), silent.end(), awaited.begin(), awaited.end(), std::back_inserter(culprits));
  if (culprits.empty()) culprits = silent;
  const char* what = "no sign of life in this call from";
  if (culprits.empty()) {
    culprits = awaited;
    what = "all ranks are in a call, perhaps not in the same: nothing came in time from";
  }
  std::string names;
  for (const Rank rank : culprits) names += (names.empty() ? "" : ", ") + mesh_.members[rank].to_string();
  return Error{ErrorCode::kTimeout, fmt::format("{} {}", what, names), culprits.empty() ? kNoRank : culprits[0], {}};
}

std::vector<Rank> Runner::silent_peers() {
  // Shared with the pongs, of which some may come when nobody waits any more.
  const auto silent = std::make_shared<std::set<Rank>>();
  for (Link* link : links_) {
    if (link == nullptr || !link->is_open()) continue;
    const Rank rank = link->peer().rank;
    silent->insert(rank);
    link->ping([silent, rank] { silent->erase(rank); });
  }
  const auto heard_of_all = [&] {
    std::erase_if(*silent, [this](Rank rank) { return closed_[rank].has_value(); });
    return silent->empty() || fatal_;
  };
  (void)mesh_.loop->run_until(heard_of_all, Deadline::after(kSignOfLife));
  return {silent->begin(), silent->end()};
}

Result<> Runner::watch(Rank awaited) {
  if (abort_flag_.load(std::memory_order_acquire)) return tl::unexpected(*abort_requested());
  mesh_.loop->poll();
  if (fatal_) return tl::unexpected(*fatal_);
  if (closed_[awaited]) return tl::unexpected(*closed_[awaited]);
  return {};
}

Error Runner::blame(Error error, const Call& call) const {
  // The team knows ranks only; who they are is known here.
  if (error.code == ErrorCode::kTimeout && error.rank != kNoRank && error.context.empty() && team_) {
    error.message += fmt::format(" ({})", mesh_.members[error.rank].to_string());
  }
  return error.in(fmt::format("{}, group \"{}\"", call.to_string(), membership_.name));
}

void Runner::request_abort(Error why) {
  {
    const std::lock_guard lock(abort_mutex_);
    if (!abort_) abort_ = std::move(why);
  }
  abort_flag_.store(true, std::memory_order_release);
  mesh_.loop->wake();
  if (team_) team_->wake_all();
}

std::optional<Error> Runner::abort_requested() {
  const std::lock_guard lock(abort_mutex_);
  return abort_;
}

void Runner::die(const Error& why) {
  if (dead_) return;
  dead_ = true;
  if (!fatal_) fatal_ = why;
  for (const Fd& process : processes_) mesh_.loop->unwatch(process.get());
  for (Link* link : links_) {
    if (link != nullptr && link->is_open()) link->close(why);
  }
  // The reason may have to wait for room; the peers name the right rank only if it arrives. Who leaves in order has
  // nothing that waits.
  if (why.code != ErrorCode::kLeft) {
    (void)mesh_.loop->run_until([this] { return !mesh_.loop->has_watches(); }, Deadline::after(kLastWords));
  }
  if (team_) team_->wake_all();
}

}  // namespace muster
