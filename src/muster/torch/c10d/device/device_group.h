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
  /// their other calls. Null unless MUSTER_NCCL_LIBRARY names a library that can be loaded at all ranks: then tensors
  /// on a device go through the host. The variable must be set at all ranks or at none. Throws at all ranks if NCCL
  /// fails at one of them, as it does for two ranks on one GPU.
  DeviceGroup* for_device(c10::Device device);
  /// Null if it has not been formed. Does not wait while another thread forms it.
  Group* formed() const;
  /// For the owner that destroys it; may be null.
  std::unique_ptr<DeviceGroup> release();

 private:
  Group& host_;
  std::mutex forming_;
  mutable std::mutex mutex_;  ///< guards the next field, which changes only while `forming_` is held, too
  std::optional<std::unique_ptr<DeviceGroup>> group_;  ///< empty until the first tensor on a device
};

}  // namespace muster
