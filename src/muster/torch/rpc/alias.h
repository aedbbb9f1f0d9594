#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "muster/rpc/ref_service.h"

namespace muster::rpc {

/// An uninitialized tensor in memory that other processes of this host can map. Throws c10::OutOfMemoryError if half of
/// the machine's memory is used up.
at::Tensor empty_shared(at::IntArrayRef sizes, const at::TensorOptions& options = {});

/// Where a tensor lies. Part of the wire format.
struct AliasPlace {
  int32_t pid;
  int32_t fd;
  uint64_t memory;  ///< the inode number of the file
  uint64_t memory_bytes;
  uint64_t offset;
};
static_assert(sizeof(AliasPlace) == 32);

/// A tensor that travels by reference, to workers on this host: they get a tensor in the same memory, and see what
/// others write there. So a call with it takes as long as one without. It may be passed any number of times, as an
/// argument or as a result. The memory is kept until the last worker has dropped its tensor, or has died and its lease
/// has ended. The tensors at other workers do not require gradients.
class Alias {
 public:
  /// `tensor` is one of empty_shared(), or a contiguous part of one. Throws ArgumentException for others.
  Alias(RefService& refs, at::Tensor tensor);

  const at::Tensor& tensor() const { return tensor_; }
  const RefPtr& ref() const { return ref_; }
  AliasPlace place() const { return place_; }
  /// Drops this worker's reference, as the destructor does. Nothing else may be called any more.
  void release() { ref_.reset(); }

 private:
  at::Tensor tensor_;
  AliasPlace place_;
  RefPtr ref_;
};

/// The tensor of an alias that has arrived. At its owner this is the original. Throws ErrorException with kUnavailable
/// if this process may not open the memory, and with kProtocol if there is no such memory.
at::Tensor open_alias(const RefPtr& ref, const AliasPlace& place, at::IntArrayRef sizes, c10::ScalarType type,
                      size_t bytes);

}  // namespace muster::rpc
