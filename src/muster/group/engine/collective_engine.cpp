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
static_assert(sizeof(Note) <= kLargestNote);

}  // namespace

Runner::Runner(Mesh mesh, const Membership& membership)
    : membership_(membership),
      mesh_(std::move(mesh)),
      links_(membership.size),
      closed_(membership.size),
      told_(membership.size),
      everyone_(membership.size) {
  std::iota(everyone_.begin(), everyone_.end(), 0);
  for (const Rank rank : everyone_) {
    if (Link* link = mesh_.linker->link(rank)) watch_link(rank, *link);
  }
  mesh_.linker->on_link([this](Rank rank, Link& link) { watch_link(rank, link); });
  tune();
}

Runner::~Runner() { die(farewell()); }

Error Runner::farewell() const { return has_left(mesh_.members[membership_.rank].to_string(), membership_.rank); }

/// What the hierarchy stands on.
Hierarchy::Levels Runner::levels() {
  return {[this](const Operation& operation, const Deadline& deadline) -> Result<> {
            auto result = run_in_team(*team_, operation, deadline);
            return result ? result : tl::unexpected(of_group(std::move(result.error())));
          },
          [this](const Operation& operation, int slot, const Deadline& deadline) {
            return begin_passage(operation, carriers(slot), mesh_.topology.host_of[membership_.rank], deadline);
          },
          [this](const Deadline& deadline) { return end_passage(deadline); }};
}

const std::vector<Rank>& Runner::locals() const {
  return mesh_.topology.hosts[mesh_.topology.host_of[membership_.rank]];
}

void Runner::watch_link(Rank rank, Link& link) {
  links_[rank] = &link;
  if (dead_) return link.close(*fatal_);  // it was on its way when the group died
  link.on_close([this, rank](const Error& why) { lost(rank, why); });
  link.on_note([this, rank](ByteView note) { hear(rank, note); });
}

void Runner::watch_processes() {
  for (const Member& member : mesh_.members) {
    Fd process = watch_process(*mesh_.loop, mesh_.members[membership_.rank], member, [this, rank = member.rank] {
      if (closed_[rank]) return;
      lost(rank, Error{ErrorCode::kPeerLost, mesh_.members[rank].to_string() + " died", rank, {}});
    });
    if (process) processes_.push_back(std::move(process));
  }
}

void Runner::lost(Rank rank, const Error& why) {
  closed_[rank] = why;
  // A peer that left may have done its part of what runs here; any other end is everybody's.
  if (why.code != ErrorCode::kLeft && !fatal_) fatal_ = why;
}

Result<> Runner::run(const Operation& operation, const Deadline& deadline) {
  if (fatal_) return refuse(operation.call);
  running_ = &operation.call;
  patience_ = Duration::zero();
  auto result = compares_ ? agree(operation, deadline) : Result<>{};
  if (result) result = dispatch(operation, deadline);
  if (!result) {
    result.error() = blame(std::move(result.error()), operation.call);
    die(result.error());
  }
  running_ = nullptr;
  return result;
}

/// A call after the first failure.
tl::unexpected<Error> Runner::refuse(const Call& call) {
  Error error = *fatal_;
  die(error);  // a link may have ended between calls: the others learn the reason now
  const bool left = error.code == ErrorCode::kLeft && error.rank == membership_.rank;
  error.message =
      left ? was_shut_down(membership_.name, membership_.rank).message : "the group has failed: " + error.message;
  return tl::unexpected(error.in(call.to_string()));
}

/// MUSTER_DEBUG=detail: every rank's call in an all-gather that is the same for all calls.
Result<> Runner::agree(const Operation& operation, const Deadline& deadline) {
  return check_agreement(operation, mesh_.members, membership_.rank, [&](const BufferView& own, const BufferView& all) {
    Operation gather;
    gather.call = {Collective::kAllGather, Dtype::kUint8, ReduceOp::kSum, 0, own.count(), 0, operation.call.sequence};
    gather.input = own;
    gather.output = all;
    return dispatch(gather, deadline);
  });
}

Result<> Runner::dispatch(const Operation& operation, const Deadline& deadline) {
  if (abort_flag_.load(std::memory_order_acquire)) return tl::unexpected(*abort_requested());
  if (membership_.size == 1) return run_alone(operation);
  return team_ && !hierarchy_ ? run_in_team(*team_, operation, deadline) : run_by_links(operation, deadline);
}

Result<> Runner::run_alone(const Operation& operation) {
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
double Runner::factor_before(const Operation& operation) const {
  const Call& call = operation.call;
  if (!reduces(call.collective)) return 1;
  if (call.op == ReduceOp::kPremulSum) return operation.factor;
  const bool narrow = call.dtype == Dtype::kFloat16 || call.dtype == Dtype::kComplex32;
  return narrow && call.op == ReduceOp::kAverage ? 1.0 / std::bit_ceil(static_cast<unsigned>(membership_.size)) : 1;
}

/// Schedules only sum: what comes before and after is done here.
Result<> Runner::run_by_links(const Operation& operation, const Deadline& deadline) {
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

/// An error of a host's team, which counts places there, as one of the group. Who is late there may himself be waiting
/// for another host.
Error Runner::of_group(Error error) {
  if (fatal_) return *fatal_;
  if (auto aborted = abort_requested()) return *aborted;
  const bool of_team = error.code == ErrorCode::kTimeout || error.code == ErrorCode::kMismatch;
  if (!of_team || error.rank == kNoRank || !error.context.empty()) return error;
  const Rank rank = locals()[error.rank];
  if (error.code == ErrorCode::kTimeout) return missed({rank});
  if (rank != error.rank) error.message += fmt::format(" (counted on this host; in the group it is rank {})", rank);
  error.rank = rank;
  return error;
}

/// In place where the input becomes the output, else in a copy.
void Runner::multiply_input(Operation& operation) {
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
Result<> Runner::begin_passage(const Operation& operation, const std::vector<Rank>& ranks, Rank self,
                               const Deadline& deadline) {
  MUSTER_TRY(passage_.plan(operation, self, static_cast<int>(ranks.size())));
  std::vector<Rank> unlinked;
  for (const Rank peer : passage_.peers()) {
    if (links_[ranks[peer]] == nullptr) unlinked.push_back(ranks[peer]);
  }
  if (!unlinked.empty()) MUSTER_TRY(link_with(unlinked, deadline));
  route_.clear();
  for (const Rank rank : ranks) route_.push_back(links_[rank]);
  passage_.begin(operation, route_);
  return {};
}

Result<> Runner::link_with(const std::vector<Rank>& ranks, const Deadline& deadline) {
  auto linked = mesh_.linker->link_with(ranks, deadline, [this]() -> std::optional<Error> {
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
  return tl::unexpected(missed(missing));
}

/// Ranks in different calls may wait for each other before anything has met that would tell. So who waits for long
/// looks where the others are and tells them where it is, again and again, and less and less often.
Result<> Runner::look() {
  if (patience_ > Duration::zero() && !next_look_.passed()) return {};
  const bool first = patience_ == Duration::zero();
  patience_ = first ? kFirstLook * std::max(1, membership_.size / kMostFullMesh) : 2 * patience_;
  next_look_ = Deadline::after(patience_);
  if (first || running_ == nullptr) return {};
  const Note note = running_->pack();
  for (Link* link : links_) {
    if (link != nullptr) link->note({reinterpret_cast<const uint8_t*>(note.data()), sizeof(note)});
  }
  Error mismatch{ErrorCode::kMismatch, "", kNoRank, {}};
  if (!fatal_ && explain(mismatch)) fatal_ = std::move(mismatch);
  return fatal_ ? tl::unexpected(*fatal_) : Result<>{};
}

/// The call that a rank has waited in for long. This one may come to it later, or have left it behind.
void Runner::hear(Rank rank, ByteView note) {
  Note words;
  if (note.size() != sizeof(words)) return;
  std::memcpy(words.data(), note.data(), sizeof(words));
  const Call& call = told_[rank].emplace(Call::unpack(words));
  if (running_ == nullptr || fatal_ || call == *running_ || call.sequence > running_->sequence) return;
  Error mismatch{ErrorCode::kMismatch, "", kNoRank, {}};
  if (explain(mismatch, call.sequence)) fatal_ = std::move(mismatch);
}

Result<> Runner::end_passage(const Deadline& deadline) {
  // Also when a rank has gone that this call has no link with: those who wait for it may never hear of it otherwise.
  const auto finished = [&] {
    return passage_.outcome().has_value() || fatal_ || abort_flag_.load(std::memory_order_acquire);
  };
  for (;;) {
    MUSTER_TRY(look());
    const auto waited = mesh_.loop->run_until(finished, deadline.or_sooner(next_look_.when()));
    if (passage_.outcome()) return *passage_.outcome();
    if (fatal_) return tl::unexpected(*fatal_);
    if (waited) return tl::unexpected(*abort_requested());
    if (deadline.passed()) return tl::unexpected(missed(passage_.waiting_for()));
  }
}

/// By host: who carries the slot.
const std::vector<Rank>& Runner::carriers(int slot) {
  const Topology& topology = mesh_.topology;
  carriers_.clear();
  for (int host = 0; host < static_cast<int>(topology.hosts.size()); ++host) {
    carriers_.push_back(topology.hosts[host][topology.carrier(host, slot)]);
  }
  return carriers_;
}

/// The error of a missed deadline. Whom this rank waits for may itself be waiting for the culprit: that is one who
/// gives no sign of life, being stopped or not in the call at all. (Or one whose answer is stuck behind data that this
/// rank does not take yet: so those that it waits for come first.) When all are alive, the calls themselves must
/// differ.
Error Runner::missed(const std::vector<Rank>& awaited) {
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
  if (const Rank place = team_->quitter(); place != kNoRank) return tl::unexpected(last_words(place));
  return look();
}

/// Why a rank of this host has failed. It says so on its link, but perhaps behind bytes that a rank which waits in the
/// team does not take, or by way of ranks that are busy or stopped. Whom it blames stands in the team's memory, too.
Error Runner::last_words(Rank place) {
  const Rank quitter = locals()[place];
  skipped_.resize(size_t{64} << 10);
  if (links_[quitter] != nullptr) skip_bytes(quitter);
  (void)mesh_.loop->run_until([this] { return fatal_.has_value(); }, Deadline::after(kLastWords));
  if (fatal_) return *fatal_;
  std::string what = mesh_.members[quitter].to_string() + " has failed";
  const Rank blamed = team_->blamed_by(place);
  if (blamed < 0 || blamed >= membership_.size || blamed == quitter) {
    return Error{ErrorCode::kAborted, std::move(what), quitter, {}};
  }
  what += fmt::format(" and blames {}", mesh_.members[blamed].to_string());
  return Error{ErrorCode::kAborted, std::move(what), blamed, {}};
}

void Runner::skip_bytes(Rank rank) {
  const Segment room{skipped_.data(), skipped_.size()};
  links_[rank]->receive({&room, 1}, [this, rank](const Result<>& outcome) {
    if (outcome) skip_bytes(rank);
  });
}

/// By recorders, of this host's ranks; of the others by what they told.
std::vector<Sighting> Runner::look_around(uint64_t sequence) const {
  auto sightings = muster::look_around(mesh_.members, group_id(), membership_.rank, sequence);
  for (const Rank rank : everyone_) {
    Sighting& sighting = sightings[rank];
    const Call* const told = rank == membership_.rank ? running_ : told_[rank] ? &*told_[rank] : nullptr;
    if (sighting.known || told == nullptr || told->sequence != sequence) continue;
    sighting.known = true;
    sighting.here = sighting.last = Record{.call = *told, .state = RecordState::kRunning};
  }
  return sightings;
}

/// Makes the error say where all ranks are, if more is known of that than it says.
bool Runner::explain(Error& error) const { return running_ != nullptr && explain(error, running_->sequence); }

bool Runner::explain(Error& error, uint64_t sequence) const {
  const bool explained = error.code == ErrorCode::kMismatch && compares_;
  if (explained || (error.code != ErrorCode::kTimeout && error.code != ErrorCode::kMismatch)) return false;
  auto sightings = look_around(sequence);
  if (error.code == ErrorCode::kTimeout && error.rank != kNoRank) sightings[error.rank].silent = true;
  const When when = error.code == ErrorCode::kTimeout ? When::kTooLate : When::kInTime;
  const Report report = compose_report(sightings, membership_.rank, when);
  if (report.text.empty()) return false;
  error.message = report.text;
  error.rank = report.culprit;
  if (!report.mismatch) return true;
  error.code = ErrorCode::kMismatch;
  error.message += "; all ranks must make the same calls in the same order";
  return true;
}

Error Runner::blame(Error error, const Call& call) const {
  if (error.context.empty()) (void)explain(error);
  // The team knows ranks only; who they are is known here.
  if (error.code == ErrorCode::kTimeout && error.rank != kNoRank && error.context.empty() && team_) {
    const std::string who = mesh_.members[error.rank].to_string();
    if (error.message.find(who) == std::string::npos) error.message += fmt::format(" ({})", who);
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
  if (team_ && why.code != ErrorCode::kLeft) team_->give_up(why.rank);
  // The reason may have to wait for room; the peers name the right rank only if it arrives. Who leaves in order has
  // nothing that waits.
  if (why.code != ErrorCode::kLeft) {
    (void)mesh_.loop->run_until([this] { return !mesh_.loop->has_watches(); }, Deadline::after(kLastWords));
  }
  if (team_) team_->wake_all();
}

}  // namespace muster
