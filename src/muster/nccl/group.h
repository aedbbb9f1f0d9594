#pragma once

#include <memory>

#include "muster/group/group.h"
#include "muster/nccl/device.h"

namespace muster::nccl {

/// A group of the ranks of `host` whose collectives run on devices, over NCCL. Collective over `host`, within its
/// timeout. kUnavailable if there is no NCCL.
///
/// A call gives its operation to the stream of the calling thread, and its memory is the device's. Its Work is done
/// once the device has ended it. The group is as any other, but for what NCCL cannot do:
/// - Messages of two ranks are matched in the order of the calls: no tags (kUnsupported), and not kAnyRank.
/// - Calls of ranks are not compared: if they differ, the operation ends at its timeout.
///
/// `host` carries what does not belong on the device: the forming, and the news that a rank has left, has died, or has
/// aborted the group. It belongs to the new group: when an operation is late, its threads make collectives of `host`.
Result<std::unique_ptr<Group>> form_group(std::shared_ptr<Group> host, std::shared_ptr<Device> device);

}  // namespace muster::nccl
