#pragma once

#include "muster/collective/operation.h"
#include "muster/shm/host_comm.h"

namespace muster {

/// A collective of ranks that share one host's memory. Stands beside the schedules behind the same definition of the
/// result (operation.h): hand-written because here the copies, not the messages, are the cost.
///
/// Every call is compared with the peers', and kMismatch names the rank and both calls before any output is written
/// with their data. Reductions combine elements in rank order everywhere, so all ranks get the same bits.
/// kUnsupported for a collective that has no such form.
Result<> run_on_host(HostComm& comm, const Operation& operation, const Deadline& deadline);

}  // namespace muster
