#pragma once

#include "muster/torch/reducer/reducer_buckets.h"

namespace muster {

/// Collective. Throws at every rank unless all ranks have the same parameters and buffers: equal in number, name,
/// shape, strides, dtype, device type and whether they require gradients. The error names the first rank that differs
/// from rank 0, the first of its tensors that differs, and the tensor's description at both ranks. Costs one small
/// exchange if all ranks have the same model. Compares options.model_parameters and model_buffers, or the context's
/// parameters if there are none.
void verify_model(const ReducerContext& context);

}  // namespace muster
