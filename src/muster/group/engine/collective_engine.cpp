#include "muster/group/engine/collective_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <iterator>
#include <numeric>
#include <set>

#include "muster/collective/host/host_collectives.h"
#include "muster/flight/report.h"
#include "muster/group/shutdown_errors.h"
#include "muster/kernels/reduce.h"

namespace muster {
namespace {

/// How long peers may take, after a deadline was missed, to show that they are alive. A peer that can't read a ping,
/// being stuck in the middle of a frame, pings for itself once its own deadline has passed.
constexpr Duration kSignOfLife = std::chrono::seconds(2);
/// When a rank that waits looks for the first time whether all are in the same call. Many ranks, who each read of all,
/// wait in proportion.
constexpr Duration kFirstLook = std::chrono::seconds(1);

/// A note between ranks is the call that one waits in: Call::pack().
using Note = std::array<uint64_t, 4>;
static_assert(sizeof(Note) <= kMaxControlMessage);

}  // namespace

CollectiveEngine::CollectiveEngine(Mesh mesh, const GroupSpec& membership)
    : membership_(membership),
      mesh_(std::move(mesh)),
      links_(membership.size),
      closed_(membership.size),
      told_(membership.size),
      everyone_(membership.size) {
  std::iota(everyone_.begin(), everyone_.end(), 0);
  for (const Rank rank : everyone_) {
    if (Link* link = mesh_.link_table->link(rank)) watch_link(rank, *link);
  }
  mesh_.link_table->on_link([this](Rank rank, Link& link) { watch_link(rank, link); });
  tune();
}

CollectiveEngine::~CollectiveEngine() { die(farewell()); }

Error CollectiveEngine::farewell() const {
  return has_left(mesh_.members[membership_.rank].to_string(), membership_.rank);
}

/// What the hierarchy stands on.
Hierarchy::Levels CollectiveEngine::levels() {
  return {[this](const Operation& operation, const Deadline& deadline) -> Result<> {
            auto result = run_on_host(*comm_, operation, deadline);
            return result ? result : tl::unexpected(of_group(std::move(result.error())));
          },
          [this](const Operation& operation, int shard, const Deadline& deadline) {
            return begin_passage(operation, carriers(shard), mesh_.topology.host_of[membership_.rank], deadline);
          },
          [this](const Deadline& deadline) { return end_passage(deadline); }};
}

const std::vector<Rank>& CollectiveEngine::host_ranks() const {
  return mesh_.topology.hosts[mesh_.topology.host_of[membership_.rank]];
}

void CollectiveEngine::watch_link(Rank rank, Link& link) {
  links_[rank] = &link;
  if (dead_) return link.close(*fatal_);  // it was on its way when the group died
  link.on_close([this, rank](const Error& why) { on_link_closed(rank, why); });
  link.set_control_handler([this, rank](ByteView note) { on_peer_call(rank, note); });
}

void CollectiveEngine::watch_processes() {
  for (const RankInfo& member : mesh_.members) {
    Fd process = watch_process(*mesh_.loop, mesh_.members[membership_.rank], member, [this, rank = member.rank] {
      if (closed_[rank]) return;
      on_link_closed(rank, Error{ErrorCode::kPeerLost, mesh_.members[rank].to_string() + " died", rank, {}});
    });
    if (process) processes_.push_back(std::move(process));
  }
}

void CollectiveEngine::on_link_closed(Rank rank, const Error& why) {
  closed_[rank] = why;
  // A peer that left may have done its part of what runs here; any other end is everybody's.
  if (why.code != ErrorCode::kLeft && !fatal_) fatal_ = why;
}

Result<> CollectiveEngine::run(const Operation& operation, const Deadline& deadline) {
  if (fatal_) return refuse(operation.call);
  running_ = &operation.call;
  patience_ = Duration::zero();
  auto result = compares_ ? agree(operation, deadline) : Result<>{};
  if (result) result = dispatch(operation, deadline);
  if (!result) {
    result.error() = annotate(std::move(result.error()), operation.call);
    die(result.error());
  }
  running_ = nullptr;
  return result;
}

/// A call after the first failure.
tl::unexpected<Error> CollectiveEngine::refuse(const Call& call) {
  Error error = *fatal_;
  die(error);  // a link may have ended between calls: the others learn the reason now
  const bool left = error.code == ErrorCode::kLeft && error.rank == membership_.rank;
  error.message =
      left ? was_shut_down(membership_.name, membership_.rank).message : "the group has failed: " + error.message;
  return tl::unexpected(error.in(call.to_string()));
}

/// MUSTER_DEBUG=detail: every rank's call in an all-gather that is the same for all calls.
Result<> CollectiveEngine::agree(const Operation& operation, const Deadline& deadline) {
  return check_fingerprints(operation, mesh_.members, membership_.rank,
                            [&](const BufferView& own, const BufferView& all) {
                              Operation gather;
                              gather.call = {Collective::kAllGather, Dtype::kUint8, ReduceOp::kSum, 0, own.count(), 0,
                                             operation.call.sequence};
                              gather.input = own;
                              gather.output = all;
                              return dispatch(gather, deadline);
                            });
}

Result<> CollectiveEngine::dispatch(const Operation& operation, const Deadline& deadline) {
  if (abort_flag_.load(std::memory_order_acquire)) return tl::unexpected(*abort_requested());
  if (membership_.size == 1) return run_alone(operation);
  return comm_ && !hierarchy_ ? run_on_host(*comm_, operation, deadline) : run_by_links(operation, deadline);
}

Result<> CollectiveEngine::run_alone(const Operation& operation) {
  const Call& call = operation.call;
  size_t offset = 0;
  operation.input.visit(0, operation.input.bytes(), [&](const uint8_t* from, size_t bytes) {
    operation.output.visit(offset, bytes, [&](uint8_t* to, size_t here) {
      if (to != from) std::memmove(to, from, here);
      if (call.op == ReduceOp::kPremulSum && reduces(call.collective)) {
        scale(to, to, here / size_of(call.dtype), call.dtype, operation.factor);
      }
      from += here;
    });
    offset += bytes;
  });
  return {};
}

/// What an input is multiplied by before it is summed. The sum of float16 leaves its range long before the average
/// does, so inputs are made smaller first: by a power of two, which rounds nothing but subnormal numbers.
double CollectiveEngine::factor_before(const Operation& operation) const {
  const Call& call = operation.call;
  if (!reduces(call.collective)) return 1;
  if (call.op == ReduceOp::kPremulSum) return operation.factor;
  const bool narrow = call.dtype == Dtype::kFloat16 || call.dtype == Dtype::kComplex32;
  return narrow && call.op == ReduceOp::kAverage ? 1.0 / std::bit_ceil(static_cast<unsigned>(membership_.size)) : 1;
}

/// Schedules only sum: what comes before and after is done here.
Result<> CollectiveEngine::run_by_links(const Operation& operation, const Deadline& deadline) {
  const Call& call = operation.call;
  std::optional<Operation> multiplied;
  const double factor = factor_before(operation);
  if (factor != 1) {
    multiplied = operation;
    multiplied->factor = factor;
    multiply_input(*multiplied);
  }
  const Operation& summed = multiplied ? *multiplied : operation;
  if (hierarchy_ && Hierarchy::has(call.collective)) {
    MUSTER_TRY(hierarchy_->run(summed, deadline));
  } else {
    MUSTER_TRY(begin_passage(summed, everyone_, membership_.rank, deadline));
    MUSTER_TRY(end_passage(deadline));
  }
  const bool has_result = call.collective != Collective::kReduce || call.root == membership_.rank;
  if (reduces(call.collective) && call.op == ReduceOp::kAverage && has_result) {
    const double rest = 1 / (factor * membership_.size);
    operation.output.visit(0, operation.output.bytes(), [&](uint8_t* data, size_t bytes) {
      const size_t count = bytes / size_of(call.dtype);
      factor == 1 ? divide_by(data, count, call.dtype, membership_.size) : scale(data, data, count, call.dtype, rest);
    });
  }
  return {};
}

/// Translates an error of the host communicator, whose ranks count from 0 on each host, into one of the group. A rank
/// that is late there may itself be waiting for another host.
Error CollectiveEngine::of_group(Error error) {
  if (fatal_) return *fatal_;
  if (auto aborted = abort_requested()) return *aborted;
  const bool of_host_comm = error.code == ErrorCode::kTimeout || error.code == ErrorCode::kMismatch;
  if (!of_host_comm || error.rank == kNoRank || !error.context.empty()) return error;
  const Rank rank = host_ranks()[error.rank];
  if (error.code == ErrorCode::kTimeout) return timeout_error({rank});
  if (rank != error.rank) error.message += fmt::format(" (counted on this host; in the group it is rank {})", rank);
  error.rank = rank;
  return error;
}

/// In place where the input becomes the output, else in a copy.
void CollectiveEngine::multiply_input(Operation& operation) {
  const Call& call = operation.call;
  const bool in_place = call.collective == Collective::kAllReduce ||
                        (call.collective == Collective::kReduce && call.root == membership_.rank);
  if (!in_place) {
    multiplied_.resize(operation.input.bytes());
    operation.input.read(0, multiplied_.data(), multiplied_.size());
    operation.input = {multiplied_.data(), operation.input.count(), call.dtype};
  }
  operation.input.visit(0, operation.input.bytes(), [&](uint8_t* data, size_t bytes) {
    scale(data, data, bytes / size_of(call.dtype), call.dtype, operation.factor);
  });
}

/// Between `ranks`, of which this one is `self`.
Result<> CollectiveEngine::begin_passage(const Operation& operation, const std::vector<Rank>& ranks, Rank self,
                                         const Deadline& deadline) {
  MUSTER_TRY(schedule_runner_.plan(operation, self, static_cast<int>(ranks.size())));
  std::vector<Rank> unlinked;
  for (const Rank peer : schedule_runner_.peers()) {
    if (links_[ranks[peer]] == nullptr) unlinked.push_back(ranks[peer]);
  }
  if (!unlinked.empty()) MUSTER_TRY(link_with(unlinked, deadline));
  route_.clear();
  for (const Rank rank : ranks) route_.push_back(links_[rank]);
  schedule_runner_.begin(operation, route_);
  return {};
}

Result<> CollectiveEngine::link_with(const std::vector<Rank>& ranks, const Deadline& deadline) {
  auto linked = mesh_.link_table->link_with(ranks, deadline, [this]() -> std::optional<Error> {
    if (abort_flag_.load(std::memory_order_acquire)) return abort_requested();
    return fatal_;
  });
  if (linked || fatal_ || abort_flag_.load(std::memory_order_acquire)) return linked;
  if (linked.error().code != ErrorCode::kTimeout) {
    // Who does not answer may have gone because of another, and the news be on its way.
    (void)mesh_.loop->run_until([this] { return fatal_.has_value(); }, Deadline::after(kLastWords));
    return fatal_ ? tl::unexpected(*fatal_) : linked;
  }
  std::vector<Rank> missing;
  std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(missing),
               [this](Rank r) { return links_[r] == nullptr; });
  return tl::unexpected(timeout_error(missing));
}

/// Ranks in different calls may wait for each other before anything has met that would tell. So who waits for long
/// looks where the others are and tells them where it is, again and again, and less and less often.
Result<> CollectiveEngine::check_desync() {
  if (patience_ > Duration::zero() && !next_look_.passed()) return {};
  const bool first = patience_ == Duration::zero();
  patience_ = first ? kFirstLook * std::max(1, membership_.size / kMaxFullMesh) : 2 * patience_;
  next_look_ = Deadline::after(patience_);
  if (first || running_ == nullptr) return {};
  const Note note = running_->pack();
  for (Link* link : links_) {
    if (link != nullptr) link->send_control({reinterpret_cast<const uint8_t*>(note.data()), sizeof(note)});
  }
  Error mismatch{ErrorCode::kMismatch, "", kNoRank, {}};
  if (!fatal_ && explain(mismatch)) fatal_ = std::move(mismatch);
  return fatal_ ? tl::unexpected(*fatal_) : Result<>{};
}

/// The call that a rank has waited in for long. This one may come to it later, or have left it behind.
void CollectiveEngine::on_peer_call(Rank rank, ByteView note) {
  Note words;
  if (note.size() != sizeof(words)) return;
  std::memcpy(words.data(), note.data(), sizeof(words));
  const Call& call = told_[rank].emplace(Call::unpack(words));
  if (running_ == nullptr || fatal_ || call == *running_ || call.sequence > running_->sequence) return;
  Error mismatch{ErrorCode::kMismatch, "", kNoRank, {}};
  if (explain(mismatch, call.sequence)) fatal_ = std::move(mismatch);
}

Result<> CollectiveEngine::end_passage(const Deadline& deadline) {
  // Also when a rank has gone that this call has no link with: those who wait for it may never hear of it otherwise.
  const auto finished = [&] {
    return schedule_runner_.outcome().has_value() || fatal_ || abort_flag_.load(std::memory_order_acquire);
  };
  for (;;) {
    MUSTER_TRY(check_desync());
    const auto waited = mesh_.loop->run_until(finished, deadline.or_sooner(next_look_.when()));
    if (schedule_runner_.outcome()) return *schedule_runner_.outcome();
    if (fatal_) return tl::unexpected(*fatal_);
    if (waited) return tl::unexpected(*abort_requested());
    if (deadline.passed()) return tl::unexpected(timeout_error(schedule_runner_.waiting_for()));
  }
}

/// By host: who carries the slot.
const std::vector<Rank>& CollectiveEngine::carriers(int shard) {
  const Topology& topology = mesh_.topology;
  carriers_.clear();
  for (int host = 0; host < static_cast<int>(topology.hosts.size()); ++host) {
    carriers_.push_back(topology.hosts[host][topology.shard_rank(host, shard)]);
  }
  return carriers_;
}

/// The error of a missed deadline. Whom this rank waits for may itself be waiting for the culprit: that is one who
/// gives no sign of life, being stopped or not in the call at all. (Or one whose answer is stuck behind data that this
/// rank does not take yet: so those that it waits for come first.) When all are alive, the calls themselves must
/// differ.
Error CollectiveEngine::timeout_error(const std::vector<Rank>& awaited) {
  Error error{ErrorCode::kTimeout, "", kNoRank, {}};
  if (!fatal_ && explain(error)) return error;
  const std::vector<Rank> silent = silent_peers();
  if (fatal_) return *fatal_;  // meanwhile a peer has found out, or died
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

std::vector<Rank> CollectiveEngine::silent_peers() {
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

Result<> CollectiveEngine::watch(Rank awaited) {
  if (abort_flag_.load(std::memory_order_acquire)) return tl::unexpected(*abort_requested());
  mesh_.loop->poll();
  if (fatal_) return tl::unexpected(*fatal_);
  if (closed_[awaited]) return tl::unexpected(*closed_[awaited]);
  if (const Rank place = comm_->quitter(); place != kNoRank) return tl::unexpected(drain_peer_error(place));
  return check_desync();
}

/// Why a rank of this host has failed. It says so on its link, but perhaps behind bytes that a rank which waits in the
/// host communicator does not take, or by way of ranks that are busy or stopped. Whom it blames stands in the host
/// communicator's memory, too.
Error CollectiveEngine::drain_peer_error(Rank place) {
  const Rank quitter = host_ranks()[place];
  skipped_.resize(size_t{64} << 10);
  if (links_[quitter] != nullptr) skip_bytes(quitter);
  (void)mesh_.loop->run_until([this] { return fatal_.has_value(); }, Deadline::after(kLastWords));
  if (fatal_) return *fatal_;
  std::string what = mesh_.members[quitter].to_string() + " has failed";
  const Rank blamed = comm_->blamed_by(place);
  if (blamed < 0 || blamed >= membership_.size || blamed == quitter) {
    return Error{ErrorCode::kAborted, std::move(what), quitter, {}};
  }
  what += fmt::format(" and blames {}", mesh_.members[blamed].to_string());
  return Error{ErrorCode::kAborted, std::move(what), blamed, {}};
}

void CollectiveEngine::skip_bytes(Rank rank) {
  const Segment room{skipped_.data(), skipped_.size()};
  links_[rank]->receive({&room, 1}, [this, rank](const Result<>& outcome) {
    if (outcome) skip_bytes(rank);
  });
}

/// By recorders, of this host's ranks; of the others by what they told.
std::vector<RankState> CollectiveEngine::collect_rank_states(uint64_t sequence) const {
  auto rank_states = muster::collect_rank_states(mesh_.members, group_id(), membership_.rank, sequence);
  for (const Rank rank : everyone_) {
    RankState& rank_state = rank_states[rank];
    const Call* const told = rank == membership_.rank ? running_ : told_[rank] ? &*told_[rank] : nullptr;
    if (rank_state.known || told == nullptr || told->sequence != sequence) continue;
    rank_state.known = true;
    rank_state.here = rank_state.last = Record{.call = *told, .state = RecordState::kRunning};
  }
  return rank_states;
}

/// Makes the error say where all ranks are, if more is known of that than it says.
bool CollectiveEngine::explain(Error& error) const { return running_ != nullptr && explain(error, running_->sequence); }

bool CollectiveEngine::explain(Error& error, uint64_t sequence) const {
  const bool explained = error.code == ErrorCode::kMismatch && compares_;
  if (explained || (error.code != ErrorCode::kTimeout && error.code != ErrorCode::kMismatch)) return false;
  auto rank_states = collect_rank_states(sequence);
  if (error.code == ErrorCode::kTimeout && error.rank != kNoRank) rank_states[error.rank].silent = true;
  const When when = error.code == ErrorCode::kTimeout ? When::kTooLate : When::kInTime;
  const Report report = compose_report(rank_states, membership_.rank, when);
  if (report.text.empty()) return false;
  error.message = report.text;
  error.rank = report.culprit;
  if (!report.mismatch) return true;
  error.code = ErrorCode::kMismatch;
  error.message += "; all ranks must make the same calls in the same order";
  return true;
}

Error CollectiveEngine::annotate(Error error, const Call& call) const {
  if (error.context.empty()) (void)explain(error);
  // The host communicator knows ranks only; who they are is known here.
  if (error.code == ErrorCode::kTimeout && error.rank != kNoRank && error.context.empty() && comm_) {
    const std::string who = mesh_.members[error.rank].to_string();
    if (error.message.find(who) == std::string::npos) error.message += fmt::format(" ({})", who);
  }
  return error.in(fmt::format("{}, group \"{}\"", call.to_string(), membership_.name));
}

void CollectiveEngine::request_abort(Error why) {
  {
    const std::lock_guard lock(abort_mutex_);
    if (!abort_) abort_ = std::move(why);
  }
  abort_flag_.store(true, std::memory_order_release);
  mesh_.loop->wake();
  if (comm_) comm_->wake_all();
}

std::optional<Error> CollectiveEngine::abort_requested() {
  const std::lock_guard lock(abort_mutex_);
  return abort_;
}

void CollectiveEngine::die(const Error& why) {
  if (dead_) return;
  dead_ = true;
  if (!fatal_) fatal_ = why;
  for (const Fd& process : processes_) mesh_.loop->unwatch(process.get());
  for (Link* link : links_) {
    if (link != nullptr && link->is_open()) link->close(why);
  }
  if (comm_ && why.code != ErrorCode::kLeft) comm_->give_up(why.rank);
  // The reason may have to wait for room; the peers name the right rank only if it arrives. Who leaves in order has
  // nothing that waits.
  if (why.code != ErrorCode::kLeft) {
    (void)mesh_.loop->run_until([this] { return !mesh_.loop->has_watches(); }, Deadline::after(kLastWords));
  }
  if (comm_) comm_->wake_all();
}

}  // namespace muster
