#include "muster/group/engine/collective_engine.h"

#include <fmt/format.h>

#include <cstring>
#include <numeric>

#include "muster/collective/host/host_collectives.h"
#include "muster/group/engine/fingerprint_check.h"
#include "muster/group/engine/scaling.h"
#include "muster/group/shutdown_errors.h"
#include "muster/kernels/reduce.h"
#include "muster/transport/links/process_monitor.h"

namespace muster {
namespace {

/// Computes the result in a group of one rank: a copy of the input.
void copy_to_output(const Operation& operation) {
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
}

/// Receives and drops all bytes until the link ends.
void discard_bytes(Link& link, std::shared_ptr<Bytes> buffer) {
  const Segment into{buffer->data(), buffer->size()};
  link.receive({&into, 1}, [&link, buffer = std::move(buffer)](const Result<>& received) {
    if (received) discard_bytes(link, buffer);
  });
}

}  // namespace

CollectiveEngine::CollectiveEngine(Mesh mesh, const GroupSpec& spec)
    : spec_(spec),
      mesh_(std::move(mesh)),
      detector_(*mesh_.loop, *mesh_.link_table),
      diagnosis_(spec_, mesh_.members, group_id(), fingerprint_check_enabled(), detector_),
      links_(spec.size),
      pipeline_(pipeline_for(mesh_)),
      all_ranks_(spec.size) {
  std::iota(all_ranks_.begin(), all_ranks_.end(), 0);
  const auto linked = [this](Rank rank, LinkTable::Side, Link& link) {
    links_[rank] = &link;
    link.set_control_handler([this, rank](ByteView message) { diagnosis_.on_peer_call(rank, message); });
  };
  const auto lost = [this](Rank rank, LinkTable::Side, const Error& why) { detector_.on_lost(rank, why); };
  const auto died = [this](Rank rank, const Error& why) { detector_.on_lost(rank, why); };
  mesh_.link_table->set_events({.linked = linked, .lost = lost, .died = died});
}

CollectiveEngine::~CollectiveEngine() { shut_down(leave_reason()); }

Error CollectiveEngine::leave_reason() const { return has_left(mesh_.members[spec_.rank].to_string(), spec_.rank); }

Result<> CollectiveEngine::run(const Operation& operation, const Deadline& deadline) {
  const Call& call = operation.call;
  if (detector_.failure()) {
    Error error = *detector_.failure();
    shut_down(error);  // a link may have failed between calls; this tells the peers the reason
    const bool left = error.phase == GroupPhase::kLeft && error.rank == spec_.rank;
    error.message = left ? was_shut_down(spec_.name, spec_.rank).message : "the group has failed: " + error.message;
    return tl::unexpected(error.in(call.to_string()));
  }
  diagnosis_.begin(call);
  auto result = diagnosis_.compares_calls() ? compare_calls(operation, deadline) : Result<>{};
  if (result) result = dispatch(operation, deadline);
  if (!result) {
    result.error() = result.error().in(fmt::format("{}, group \"{}\"", call.to_string(), spec_.name));
    result.error().phase = GroupPhase::kRunning;
    shut_down(result.error());
  }
  diagnosis_.end();
  return result;
}

/// For MUSTER_DEBUG=detail. The all_gather has the same shape for every call, so it works even if the calls differ.
Result<> CollectiveEngine::compare_calls(const Operation& operation, const Deadline& deadline) {
  return check_fingerprints(operation, mesh_.members, spec_.rank, [&](const BufferView& own, const BufferView& all) {
    const Call gather{.collective = Collective::kAllGather, .count = own.count(), .sequence = operation.call.sequence};
    return dispatch({gather, own, all}, deadline);
  });
}

Result<> CollectiveEngine::dispatch(const Operation& operation, const Deadline& deadline) {
  if (detector_.interrupted()) return tl::unexpected(*detector_.interruption());
  if (comm_ && !hierarchy_ && spec_.size > 1) return run_on_host_comm(operation, deadline);
  MUSTER_TRY(operation.wait_for_input(operation.input.bytes(), deadline));
  if (spec_.size > 1) return run_over_links(operation, deadline);
  copy_to_output(operation);
  return {};
}

Result<> CollectiveEngine::run_on_host_comm(const Operation& operation, const Deadline& deadline) {
  auto result = run_on_host(*comm_, operation, deadline);
  return result ? result : tl::unexpected(host_comm_error(std::move(result.error())));
}

Result<> CollectiveEngine::run_over_links(const Operation& operation, const Deadline& deadline) {
  const double factor = input_factor(operation, spec_.size);
  std::optional<Operation> scaled;
  if (factor != 1) scaled = scale_input(operation, factor, spec_.rank, scaled_);
  const Operation& summed = scaled ? *scaled : operation;
  if (hierarchy_ && Hierarchy::has(operation.call.collective)) {
    MUSTER_TRY(hierarchy_->run(summed, deadline));
  } else {
    if (!pipeline_.resume(summed)) MUSTER_TRY(begin_schedule(summed, all_ranks_, spec_.rank, deadline));
    MUSTER_TRY(finish_schedule(deadline, &summed));
  }
  finish_average(operation, factor, spec_.size, spec_.rank);
  return {};
}

/// Begins a schedule between `ranks`; this rank is ranks[self].
Result<> CollectiveEngine::begin_schedule(const Operation& operation, const std::vector<Rank>& ranks, Rank self,
                                          const Deadline& deadline) {
  ScheduleRunner& runner = pipeline_.runner();
  MUSTER_TRY(runner.plan(operation, self, static_cast<int>(ranks.size())));
  std::vector<Rank> unlinked;
  for (const Rank peer : runner.peers()) {
    if (links_[ranks[peer]] == nullptr) unlinked.push_back(ranks[peer]);
  }
  if (!unlinked.empty()) MUSTER_TRY(connect(unlinked, deadline));
  schedule_links_.clear();
  for (const Rank rank : ranks) schedule_links_.push_back(links_[rank]);
  runner.begin(operation, schedule_links_);
  return {};
}

/// `whole`: the operation, if the schedule is all of it. Then the next operation may begin meanwhile.
Result<> CollectiveEngine::finish_schedule(const Deadline& deadline, const Operation* whole) {
  const ScheduleRunner& runner = pipeline_.runner();
  // Any failure ends the wait, also that of a rank without a link in this schedule. Otherwise a rank that
  // waits for the failed rank through other ranks might wait until its deadline.
  const auto finished = [&] {
    if (runner.outcome() || detector_.interrupted()) return true;
    if (whole != nullptr) begin_next(*whole);
    return false;
  };
  for (;;) {
    MUSTER_TRY(diagnosis_.check_desync(links_));
    (void)mesh_.loop->run_until(finished, deadline.or_sooner(diagnosis_.next_check()));
    if (runner.outcome()) {
      Result<> result = *runner.outcome();
      if (!result && result.error().reported_by == kNoRank) (void)diagnosis_.explain(result.error());
      return result;
    }
    if (detector_.interrupted()) return tl::unexpected(*detector_.interruption());
    if (deadline.passed()) {
      return tl::unexpected(diagnosis_.timeout_error(runner.waiting_for(), links_));
    }
  }
}

/// Only in groups of two. With more ranks, one that waits for a third would not see a failure report that comes after
/// bytes of the next operation: it reads no bytes before it begins that operation, too.
void CollectiveEngine::begin_next(const Operation& current) {
  if (spec_.size != 2 || !next_ || !pipeline_.has_room()) return;
  const Operation* const next = next_();
  if (next == nullptr || diagnosis_.compares_calls() || input_factor(*next, spec_.size) != 1) return;
  if (hierarchy_ && Hierarchy::has(next->call.collective)) return;
  pipeline_.begin_early(*next, current, spec_.rank, links_);
}

Result<> CollectiveEngine::connect(const std::vector<Rank>& ranks, const Deadline& deadline) {
  const auto connected = mesh_.link_table->connect(ranks, deadline, [this] { return detector_.interruption(); });
  if (connected || detector_.interrupted()) return connected;
  if (connected.error().code != ErrorCode::kTimeout) {
    // The rank that does not answer may have left because another rank failed. That report may still be on its way.
    return detector_.wait_for_report() ? tl::unexpected(*detector_.failure()) : connected;
  }
  std::vector<Rank> missing = ranks;
  std::erase_if(missing, [this](Rank rank) { return links_[rank] != nullptr; });
  return tl::unexpected(diagnosis_.timeout_error(missing, links_));
}

// ---- the host communicator, whose ranks count from 0 on each host

/// The host communicator calls this while it waits for `awaited`, a rank of the group.
Result<> CollectiveEngine::watch(Rank awaited) {
  mesh_.loop->poll();
  if (detector_.interrupted()) return tl::unexpected(*detector_.interruption());
  if (const Error* lost = detector_.lost(awaited)) return tl::unexpected(*lost);
  if (const Rank failed = comm_->failed_peer(); failed != kNoRank) return tl::unexpected(report_of_failed_rank(failed));
  return diagnosis_.check_desync(links_);
}

Error CollectiveEngine::host_comm_error(Error error) {
  if (detector_.interrupted()) return *detector_.interruption();
  const bool timeout = error.code == ErrorCode::kTimeout;
  if (error.rank == kNoRank || (!timeout && error.code != ErrorCode::kMismatch)) return error;
  const Rank rank = host_ranks()[error.rank];
  // A rank that is late on this host may itself wait for another host.
  if (timeout && hierarchy_) return diagnosis_.timeout_error({rank}, links_);
  if (rank != error.rank) error.message += fmt::format(" (counted on this host; in the group it is rank {})", rank);
  error.rank = rank;
  if (!diagnosis_.explain(error) && timeout) error.message += fmt::format(" ({})", mesh_.members[rank].to_string());
  return error;
}

/// Finds out why a rank of this host has failed. The failed rank reports the reason over links. The report can be stuck
/// behind data that this rank does not receive while it waits in the host communicator, so this rank discards that
/// data. The report may also have to pass through ranks that are busy or stopped, so the host communicator's memory
/// also holds the rank to blame.
Error CollectiveEngine::report_of_failed_rank(Rank host_rank) {
  const Rank failed = host_ranks()[host_rank];
  if (links_[failed] != nullptr) discard_bytes(*links_[failed], std::make_shared<Bytes>(size_t{64} << 10));
  if (detector_.wait_for_report()) return *detector_.failure();
  std::string what = mesh_.members[failed].to_string() + " has failed";
  Rank blamed = comm_->rank_blamed_by(host_rank);
  if (blamed < 0 || blamed >= spec_.size || blamed == failed) {
    blamed = failed;
  } else {
    what += fmt::format(" and blames {}", mesh_.members[blamed].to_string());
  }
  return Error{ErrorCode::kAborted, std::move(what), blamed, {}};
}

// ---- shutdown

void CollectiveEngine::request_abort(Error why) {
  detector_.request_abort(std::move(why));
  if (comm_) comm_->wake_all();
}

void CollectiveEngine::shut_down(const Error& why) {
  if (detector_.is_shut_down()) return;
  if (comm_ && why.phase != GroupPhase::kLeft) comm_->mark_failed(why.rank);
  detector_.shut_down(why);
  if (comm_) comm_->wake_all();
}

}  // namespace muster
