#pragma once

#include <memory>
#include <string>

#include "muster/rpc/ref_service.h"
#include "muster/torch/rpc/autograd.h"

namespace muster::rpc {

/// Makes the operator of torch with this name, "library::name" or "library::name.overload", callable as `function`.
/// Calls of an operator in C++ do not wait for Python code. Arguments and results are tensors, numbers, strings, lists,
/// tuples and dicts, as the schema says. Arguments may be given by name, and have the schema's defaults. In a context
/// of distributed autograd, gradients flow back through the operator, if it has a derivative.
///
/// describe: makes the error of a call of what the operator throws. kNotFound if there is no such operator,
/// kAlreadyExists if the agent has a function with this name. The library must stay loaded.
Result<> add_operator(const std::shared_ptr<RefService>& refs, const std::shared_ptr<Autograd>& autograd,
                      const std::string& function, const std::string& name,
                      Autograd::Describe describe = current_call_error);

}  // namespace muster::rpc
