#pragma once

#include "muster/collective/call.h"
#include "muster/transport/shm/team.h"

namespace muster {

/// Collectives of ranks that share one host's memory. They stand beside the schedules behind the same definition of the
/// result: hand-written because here the copies, not the messages, are the cost.
///
/// Every call compares the call with the peers' and returns kMismatch, naming the rank and both calls, before any
/// output is written with their data.

/// In place. Bit-identical on all ranks: elements are combined in rank order everywhere. Small messages and few ranks:
/// one-shot (each rank reads every slot); else two-shot (each rank reduces its part, then reads the others' parts).
Result<> team_all_reduce(Team& team, const Call& call, void* data, const Deadline& deadline);
Result<> team_broadcast(Team& team, const Call& call, void* data, const Deadline& deadline);
/// `input` may be the own slot of `output`.
Result<> team_all_gather(Team& team, const Call& call, const void* input, void* output, const Deadline& deadline);
Result<> team_barrier(Team& team, const Call& call, const Deadline& deadline);

}  // namespace muster
