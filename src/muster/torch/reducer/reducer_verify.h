#pragma once

#include "muster/group/group.h"
#include "muster/torch/reducer/reducer.h"

namespace muster {

/// Throws at every rank unless all have as many parameters and buffers, equal in name, shape, strides, dtype, device
/// type and whether they require gradients. The error names the first that differs, the first rank where it does, and
/// what both have. One small exchange if all is well. All ranks must call.
void verify_model(Group& group, const NamedTensors& parameters, const NamedTensors& buffers);

}  // namespace muster
