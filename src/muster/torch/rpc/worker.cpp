#include "muster/torch/rpc/worker.h"

#include "muster/torch/rpc/optimizer.h"

namespace muster::rpc {

Worker::Worker(std::shared_ptr<Agent> agent)
    : agent_(std::move(agent)),
      refs_(value_or_throw(RefService::start(agent_, {}))),
      autograd_(value_or_throw(Autograd::start(agent_))) {
  value_or_throw(add_fetch(refs_, autograd_));
  const auto create = [weak = std::weak_ptr(refs_), weak_autograd = std::weak_ptr(autograd_), makers = makers_](
                          const Request& request, Responder responder) {
    const auto refs = weak.lock();
    const auto autograd = weak_autograd.lock();
    if (!refs || !autograd) return;
    try {
      const CurrentContext context(autograd->context_of(request.arguments));
      ValueReader in(request.arguments, refs.get(), request.from.id, CurrentContext::current());
      const auto [id, function] = read_create(in, *refs, request.from);
      std::shared_ptr<RefValue> value;
      try {
        Maker maker;
        {
          const std::lock_guard lock(makers->mutex);
          const auto found = makers->by_function.find(function);
          if (found != makers->by_function.end()) maker = found->second;
        }
        if (!maker) throw_error(Error{ErrorCode::kNotFound, "there is no function \"" + function + "\""});
        value = maker(in);
      } catch (...) {
        value = std::make_shared<FailedValue>(current_call_error());
      }
      refs->set_value(id, std::move(value));
      ValueWriter none;
      none.put_none();
      responder.reply(none.take());
    } catch (...) {
      responder.fail(current_call_error());
    }
  };
  value_or_throw(agent_->add_function(kCreate, create, {}));
  add_optimizer_functions(*this);
}

Worker::~Worker() {
  autograd_->stop();
  refs_->stop();
}

std::unique_ptr<Worker> Worker::start(std::shared_ptr<Store> store, EndpointOptions options, const Setup& setup) {
  const auto join = [&](EndpointOptions given) { return start_endpoint(std::move(store), std::move(given)); };
  return start(join, std::move(options), setup);
}

std::unique_ptr<Worker> Worker::join_job(EndpointOptions options, const Setup& setup) {
  return start(rpc::join_job, std::move(options), setup);
}

std::unique_ptr<Worker> Worker::start(const Start& start, EndpointOptions options, const Setup& setup) {
  std::unique_ptr<Worker> worker;
  std::exception_ptr thrown;
  options.setup = [&](Agent& agent) -> Result<> {
    try {
      worker.reset(new Worker(agent.shared_from_this()));
      if (setup) setup(*worker);
      return {};
    } catch (...) {
      thrown = std::current_exception();
      return fail(ErrorCode::kAborted, "the set-up of the worker has thrown an exception");
    }
  };
  const auto joined = start(std::move(options));
  if (thrown) std::rethrow_exception(thrown);
  value_or_throw(joined);
  return worker;
}

void Worker::add_handler(const std::string& name, const std::function<void(ValueReader&, ValueWriter&)>& body,
                         Maker maker, FunctionOptions options) {
  const auto handler = [weak = std::weak_ptr(refs_), weak_autograd = std::weak_ptr(autograd_), body](
                           const Request& request, Responder given) {
    const auto refs = weak.lock();
    const auto autograd = weak_autograd.lock();
    if (!refs || !autograd) return;
    const auto responder = std::make_shared<Responder>(std::move(given));
    try {
      const CurrentContext context(autograd->context_of(request.arguments));
      ValueReader in(request.arguments, refs.get(), request.from.id, CurrentContext::current());
      ValueWriter out(CurrentContext::current());
      expect_parts(in, 2);
      body(in, out);
      reply_with_refs(*refs, responder, request.from.name, std::move(out));
    } catch (...) {
      responder->fail(current_call_error());
    }
  };
  value_or_throw(agent_->add_function(name, handler, options));
  const std::lock_guard lock(makers_->mutex);
  makers_->by_function[name] = std::move(maker);
}

}  // namespace muster::rpc
