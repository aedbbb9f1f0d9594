#include "muster/torch/rpc/worker.h"

#include "muster/torch/rpc/handler.h"
#include "muster/torch/rpc/optimizer.h"

namespace muster::rpc {

Worker::Worker(std::shared_ptr<Agent> agent)
    : agent_(std::move(agent)),
      refs_(value_or_throw(RefService::start(agent_, {}))),
      autograd_(value_or_throw(Autograd::start(agent_))) {
  value_or_throw(add_fetch(refs_, autograd_));
  const auto create = [makers = makers_](ValueReader& in, const Request& request, const auto& refs,
                                         const auto& responder) {
    const auto [id, function] = read_create(in, *refs, request.from);
    const auto done = [refs, responder, id = id](const MakeValue& make) {
      std::shared_ptr<RefValue> value;
      try {
        value = make();
      } catch (...) {
        value = std::make_shared<FailedValue>(current_call_error());
      }
      refs->set_value(id, std::move(value));
      ValueWriter none;
      none.put_none();
      responder->reply(none.take());
    };
    try {
      makers->find(function)(in, done);
    } catch (...) {
      const auto thrown = std::current_exception();
      done([&]() -> std::shared_ptr<RefValue> { std::rethrow_exception(thrown); });
    }
  };
  value_or_throw(agent_->add_function(kCreate, handler_in_context(refs_, autograd_, create), {}));
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

Worker::Maker Worker::Makers::find(const std::string& function) {
  const std::lock_guard lock(mutex);
  const auto found = by_function.find(function);
  if (found != by_function.end()) return found->second;
  throw_error(Error{ErrorCode::kNotFound, "there is no function \"" + function + "\""});
}

void Worker::add_handler(const std::string& name, const std::variant<Body, LateBody>& body, Maker maker,
                         FunctionOptions options) {
  const auto handler = [body](ValueReader& in, const Request& request, const auto& refs, const auto& responder) {
    expect_parts(in, 2);
    if (const auto* now = std::get_if<Body>(&body)) {
      ValueWriter out(CurrentContext::current());
      (*now)(in, out);
      return reply_with_refs(*refs, responder, request.from.name, std::move(out));
    }
    std::get<LateBody>(body)(in, late_answer(refs, responder, request.from.name));
  };
  value_or_throw(agent_->add_function(name, handler_in_context(refs_, autograd_, handler), options));
  const std::lock_guard lock(makers_->mutex);
  makers_->by_function[name] = std::move(maker);
}

/// It comes from another thread, when the handler has returned.
Worker::Answer Worker::late_answer(const std::shared_ptr<RefService>& refs, std::shared_ptr<Responder> responder,
                                   std::string caller) {
  return [weak = std::weak_ptr(refs), responder = std::move(responder), caller = std::move(caller),
          context = CurrentContext::current()](const std::function<void(ValueWriter&)>& write) {
    try {
      ValueWriter out(context);
      write(out);
      if (const auto alive = weak.lock()) reply_with_refs(*alive, responder, caller, std::move(out));
    } catch (...) {
      responder->fail(current_call_error());
    }
  };
}

}  // namespace muster::rpc
