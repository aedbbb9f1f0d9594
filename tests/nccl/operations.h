#pragma once

#include <vector>

#include "muster/base/dtype.h"
#include "nccl/communicator.h"

namespace muster::fake_nccl {

enum class Kind { kAllReduce, kReduce, kBroadcast, kAllGather, kReduceScatter, kSend, kReceive };

/// A call of NCCL.
struct Operation {
  Kind kind = Kind::kAllReduce;
  const void* from = nullptr;
  void* to = nullptr;
  size_t count = 0;
  Dtype dtype = Dtype::kUint8;
  ReduceOp op = ReduceOp::kSum;
  double factor = 1;  ///< the input is multiplied by it
  int peer = 0;       ///< the root, or the other rank of a message
};

/// Runs operations as one kernel: all that they move at once. False if the communicator is aborted.
bool run(Communicator& communicator, const std::vector<Operation>& operations);

}  // namespace muster::fake_nccl
