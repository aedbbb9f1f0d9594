#pragma once

#include <vector>

#include "muster/collective/operation.h"
#include "muster/group/group.h"
#include "muster/nccl/communicator.h"
#include "muster/nccl/device.h"

namespace muster::nccl {

/// Gives collectives to the stream of this thread, as one kernel. The operations are valid (group/operations.h), and
/// their memory is the device's. kUnsupported for a dtype or a reduction that NCCL does not have: then none begins. It
/// does not wait for the other ranks, but for NCCL to connect to them at the first call, at most until the deadline.
Result<> enqueue(Communicator& communicator, const GroupSpec& self, const std::vector<Operation>& operations,
                 Device& device, const Deadline& deadline);

/// The same for messages.
Result<> enqueue(Communicator& communicator, const std::vector<Message>& messages, Device& device,
                 const Deadline& deadline);

}  // namespace muster::nccl
