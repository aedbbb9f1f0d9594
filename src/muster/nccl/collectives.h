#pragma once

#include <vector>

#include "muster/collective/operation.h"
#include "muster/group/group.h"
#include "muster/nccl/communicator.h"
#include "muster/nccl/device.h"

namespace muster::nccl {

/// Gives a collective to the stream of this thread. `operation` is valid (group/operations.h), and its memory is the
/// device's. kUnsupported for a dtype or a reduction that NCCL does not have. It does not wait for the other ranks, but
/// for NCCL to connect to them at the first call, at most until the deadline.
Result<> enqueue(Communicator& communicator, const GroupSpec& self, const Operation& operation, Device& device,
                 const Deadline& deadline);

/// The same for messages, which become one kernel.
Result<> enqueue(Communicator& communicator, const std::vector<Message>& messages, Device& device,
                 const Deadline& deadline);

}  // namespace muster::nccl
