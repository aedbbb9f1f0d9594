#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "muster/group/group.h"

namespace muster {

/// Throws at every rank unless all have as many parameters, equal in shape, strides, dtype, device type and whether
/// they require gradients. The error names the first parameter that differs, the first rank where it does, and what
/// both have. One small exchange if all is well. All ranks must call.
void verify_parameters(Group& group, const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names);

}  // namespace muster
