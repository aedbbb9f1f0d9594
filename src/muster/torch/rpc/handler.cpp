#include "muster/torch/rpc/handler.h"

namespace muster::rpc {

Handler handler_in_context(const std::shared_ptr<RefService>& refs, const std::shared_ptr<Autograd>& autograd,
                           HandlerBody body, Autograd::Describe describe) {
  return [weak = std::weak_ptr(refs), weak_autograd = std::weak_ptr(autograd), body = std::move(body), describe](
             const Request& request, Responder given) {
    const auto alive = weak.lock();
    const auto contexts = weak_autograd.lock();
    if (!alive || !contexts) return;
    const auto responder = std::make_shared<Responder>(std::move(given));
    try {
      const CurrentContext context(contexts->context_of(request.arguments));
      ValueReader in(request.arguments, alive.get(), request.from.id, CurrentContext::current());
      body(in, request, alive, responder);
    } catch (...) {
      responder->fail(describe());
    }
  };
}

}  // namespace muster::rpc
