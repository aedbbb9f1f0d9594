#pragma once

#include <functional>
#include <memory>

#include "muster/rpc/agent.h"
#include "muster/rpc/ref_service.h"
#include "muster/torch/rpc/autograd.h"
#include "muster/torch/rpc/value.h"

namespace muster::rpc {

/// A handler that runs `body` in the call's context of distributed autograd. If `body` throws, the call fails with the
/// error that `describe` makes of the exception.
using HandlerBody = std::function<void(ValueReader&, const Request&, const std::shared_ptr<RefService>&,
                                       const std::shared_ptr<Responder>&)>;
Handler handler_in_context(const std::shared_ptr<RefService>& refs, const std::shared_ptr<Autograd>& autograd,
                           HandlerBody body, Autograd::Describe describe = current_call_error);

}  // namespace muster::rpc
