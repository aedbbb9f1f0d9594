#pragma once

#include <memory>
#include <string>

#include "muster/torch/rpc/references.h"

namespace muster::rpc {

/// Makes an operator of torch callable as `function`: "library::name", or "library::name.overload". If the operator is
/// in C++, its calls never take Python's GIL. Arguments and results are tensors, numbers, strings, lists, tuples and
/// dicts, as in its schema; arguments may be given by name, and have the schema's defaults. In a context of distributed
/// autograd, gradients flow back through it. `describe`: for what it throws. kNotFound if there is no such operator,
/// kAlreadyExists for a function that is taken.
Result<> add_operator(const std::shared_ptr<RefService>& refs, const std::shared_ptr<Autograd>& autograd,
                      const std::string& function, const std::string& name, Autograd::Describe describe);

}  // namespace muster::rpc
