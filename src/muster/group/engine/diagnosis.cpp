#include "muster/group/engine/diagnosis.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>

#include "muster/group/form/mesh.h"

namespace muster {
namespace {

/// How long a rank waits before its first check. In a large group it waits longer, because every check reads the state
/// of all ranks.
constexpr Duration kFirstCheckAfter = std::chrono::seconds(1);

/// The control message between ranks: the call in which the sender waits, packed by Call::pack().
using PackedCall = std::array<uint64_t, 4>;
static_assert(sizeof(PackedCall) <= kMaxControlMessage);

}  // namespace

Diagnosis::Diagnosis(const GroupSpec& spec, const std::vector<RankInfo>& members, uint64_t group_id,
                     bool compares_calls, FailureDetector& detector)
    : spec_(spec), members_(members), group_id_(group_id), compares_calls_(compares_calls), detector_(detector) {}

void Diagnosis::begin(const Call& call) {
  running_ = &call;
  interval_ = Duration::zero();
}

Result<> Diagnosis::check_desync(const std::vector<Link*>& links) {
  const bool first = interval_ == Duration::zero();
  if (!first && !next_check_.passed()) return {};
  interval_ = first ? kFirstCheckAfter * std::max(1, spec_.size / kMaxFullMesh) : 2 * interval_;
  next_check_ = Deadline::after(interval_);
  if (first || running_ == nullptr) return {};
  const PackedCall packed = running_->pack();
  for (Link* link : links) {
    if (link != nullptr) link->send_control({reinterpret_cast<const uint8_t*>(packed.data()), sizeof(packed)});
  }
  return fail_if_mismatch(running_->sequence);
}

/// If the peer's call is later than this rank's current call, it is kept and compared once this rank gets there. An
/// earlier call is compared at once, with the flight recorders.
void Diagnosis::on_peer_call(Rank rank, ByteView message) {
  PackedCall packed;
  if (message.size() != sizeof(packed)) return;
  std::memcpy(packed.data(), message.data(), sizeof(packed));
  const Call& call = peer_calls_.insert_or_assign(rank, Call::unpack(packed)).first->second;
  if (running_ == nullptr || call == *running_ || call.sequence > running_->sequence) return;
  (void)fail_if_mismatch(call.sequence);
}

Result<> Diagnosis::fail_if_mismatch(uint64_t sequence) {
  Error mismatch{ErrorCode::kMismatch, "", kNoRank, {}};
  if (!detector_.failure() && explain(mismatch, sequence)) detector_.fail(std::move(mismatch));
  return detector_.failure() ? tl::unexpected(*detector_.failure()) : Result<>{};
}

Error Diagnosis::timeout_error(const std::vector<Rank>& awaited, const std::vector<Link*>& links) {
  Error error{ErrorCode::kTimeout, "", kNoRank, {}};
  if (!detector_.failure() && explain(error)) return error;
  const std::vector<Rank> silent = detector_.silent_ranks(links);
  if (detector_.failure()) return *detector_.failure();  // a peer reported the failure during the wait
  for (const Rank rank : awaited) {
    if (const Error* lost = detector_.lost(rank)) return *lost;
  }
  // A live rank may look silent, because its answer is stuck behind data that this rank does not receive yet. So the
  // error names the silent ranks that this rank waits for, if there are any.
  std::vector<Rank> culprits;
  std::ranges::set_intersection(silent, awaited, std::back_inserter(culprits));
  if (culprits.empty()) culprits = silent;
  const char* what = "no answer in this call from";
  if (culprits.empty()) {
    culprits = awaited;
    what = "all ranks are in a call, perhaps not in the same one: timed out waiting for";
  }
  std::string names;
  for (const Rank rank : culprits) names += (names.empty() ? "" : ", ") + members_[rank].to_string();
  return Error{ErrorCode::kTimeout, fmt::format("{} {}", what, names), culprits.empty() ? kNoRank : culprits[0], {}};
}

bool Diagnosis::explain(Error& error, uint64_t sequence) const {
  const bool timeout = error.code == ErrorCode::kTimeout;
  if (!timeout && (error.code != ErrorCode::kMismatch || compares_calls_)) return false;
  auto rank_states = collect_rank_states(sequence);
  if (timeout && error.rank != kNoRank) rank_states[error.rank].silent = true;
  const Report report = compose_report(rank_states, spec_.rank, timeout ? When::kTooLate : When::kInTime);
  if (report.text.empty()) return false;
  error.message = report.text;
  error.rank = report.culprit;
  if (!report.mismatch) return true;
  error.code = ErrorCode::kMismatch;
  error.message += "; all ranks must make the same calls in the same order";
  return true;
}

/// Reads the flight recorders of this host's ranks, and adds the calls that other ranks sent.
std::vector<RankState> Diagnosis::collect_rank_states(uint64_t sequence) const {
  auto rank_states = muster::collect_rank_states(members_, group_id_, spec_.rank, sequence);
  const auto add = [&](Rank rank, const Call& call) {
    RankState& state = rank_states[rank];
    if (state.known || call.sequence != sequence) return;
    state.known = true;
    state.here = state.last = Record{.call = call, .state = RecordState::kRunning};
  };
  for (const auto& [rank, call] : peer_calls_) {
    if (rank != spec_.rank) add(rank, call);
  }
  if (running_ != nullptr) add(spec_.rank, *running_);
  return rank_states;
}

}  // namespace muster
