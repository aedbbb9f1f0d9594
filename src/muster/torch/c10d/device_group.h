#pragma once

#include <c10/core/Stream.h>

#include <memory>

#include "muster/group/group.h"

namespace muster {

/// A group whose collectives run on a device, over NCCL, and the stream of the device for them.
struct DeviceGroup {
  std::unique_ptr<Store> store;  ///< outlives the group
  std::unique_ptr<Group> group;
  c10::Stream stream;
  c10::Device device() const { return stream.device(); }
};

/// Finds the group for tensors on a device, and forms it at the first call: then all ranks must call it. Null: tensors
/// of the device go through the host.
class DeviceGroups {
 public:
  virtual DeviceGroup* device_group(c10::Device device) = 0;

 protected:
  ~DeviceGroups() = default;
};

/// Collective over `host`, which was formed in `store`; the new group owns both. Returns null unless
/// MUSTER_NCCL_LIBRARY names a library that can be loaded at all ranks. Throws if NCCL fails, as it does for two ranks
/// on one GPU.
std::unique_ptr<DeviceGroup> form_device_group(std::unique_ptr<Store> store, std::unique_ptr<Group> host,
                                               c10::Device device);

}  // namespace muster
