#pragma once

#include <c10/core/Stream.h>

#include <memory>
#include <mutex>
#include <optional>

#include "muster/group/group.h"

namespace muster {

/// A group whose collectives run on a device, over NCCL, and the stream of the device for them.
struct DeviceGroup {
  std::unique_ptr<Group> group;
  c10::Stream stream;
  c10::Device device() const { return stream.device(); }
};

/// The group on a device of the ranks of a group. It is formed for the first tensor on a device. Thread-safe.
class LazyDeviceGroup {
 public:
  /// The group must outlive this object. At most one for each group.
  explicit LazyDeviceGroup(Group& host) : host_(host) {}

  /// The first call forms the group by collectives of the host's group. So all ranks must make it, in the same order as
  /// their other calls. Null without MUSTER_NCCL_LIBRARY, and over MPI: then tensors on a device go through the host.
  /// The variable must be set at all ranks or at none. If a rank cannot form the group, as two ranks on one GPU cannot,
  /// all ranks get its error, from this call or the next one. Each further call throws it again.
  DeviceGroup* for_device(c10::Device device);
  /// Null if it has not been formed. Does not wait while another thread forms it.
  Group* formed() const;
  /// Ends the operations that are pending, and ends the forming.
  void abort(const Error& why);
  /// For the owner that destroys it; may be null.
  std::unique_ptr<DeviceGroup> release();

 private:
  Result<std::unique_ptr<DeviceGroup>> form(c10::Device device);

  Group& host_;
  std::mutex forming_;
  mutable std::mutex mutex_;    ///< guards the next fields. group_ changes only while `forming_` is held, too
  std::weak_ptr<Group> links_;  ///< the host's group of the group on the device
  std::optional<Result<std::unique_ptr<DeviceGroup>>> group_;  ///< empty until the first tensor on a device
};

}  // namespace muster
