#pragma once

#include "muster/collective/operation.h"
#include "muster/shm/host_comm.h"

namespace muster {

/// Runs a collective of ranks that share one host's memory. The definition of the result is the same as for schedules
/// (operation.h). The code is hand-written, because on one host the copies are the cost, not the messages.
///
/// All ranks compare their calls. kMismatch names the rank and both calls before any output is written with the peers'
/// data. Reductions combine elements in rank order, so all ranks get the same bits. kUnsupported for a collective that
/// has no form in shared memory.
Result<> run_on_host(HostComm& comm, const Operation& operation, const Deadline& deadline);

}  // namespace muster
