#include "muster/torch/rpc/references.h"

#include <atomic>

#include "muster/rpc/function_table.h"
#include "muster/torch/exception.h"
#include "muster/torch/rpc/autograd/context.h"
#include "muster/torch/rpc/codec.h"
#include "muster/torch/rpc/handler.h"
#include "muster/torch/rpc/remote_error.h"

namespace muster::rpc {
namespace {

// The arguments of both are a RefId. Those of the first may begin with the record of a context.
constexpr const char* kFetch = "muster.ref.fetch";
constexpr const char* kWait = "muster.ref.wait";

ValueWriter write_id(const Ref& ref, const ContextPtr& context) {
  ValueWriter out(context);
  out.begin_tuple(2);
  out.put_int(ref.id().creator);
  out.put_int(static_cast<int64_t>(ref.id().number));
  return out;
}
RefId read_id(ValueReader& in) {
  const auto [creator, number] = read<std::pair<int, int64_t>>(in);
  in.finish();
  return {creator, static_cast<uint64_t>(number)};
}

void reply_with_value(RefService& refs, const std::shared_ptr<Responder>& responder, const std::string& receiver,
                      const RefValue& value, const ContextPtr& context) {
  ValueWriter out(context);
  try {
    dynamic_cast<const WritableValue&>(value).write(out);
  } catch (...) {
    return responder->fail(current_call_error());
  }
  reply_with_refs(refs, responder, receiver, std::move(out));
}

}  // namespace

std::string creation_of(const std::string& function) {
  return std::string(kCreate) + kNote + std::string(shown_name(function).substr(0, kMaxNoteBytes));
}

Result<> add_fetch(const std::shared_ptr<RefService>& refs, const std::shared_ptr<Autograd>& autograd) {
  const auto handler = [&](auto reply) {
    return handler_in_context(
        refs, autograd, [reply](ValueReader& in, const Request& request, const auto& service, const auto& responder) {
          const auto send = [weak = std::weak_ptr(service), reply, responder, receiver = request.from.name,
                             context = CurrentContext::current()](const std::shared_ptr<RefValue>& value) {
            const auto* failed = dynamic_cast<const FailedValue*>(value.get());
            if (failed != nullptr) return responder->fail(failed->why);
            if (const auto alive = weak.lock()) reply(*alive, responder, receiver, *value, context);
          };
          const auto given_up = [caller = Request{{}, {}, {}, request.deadline, request.canceled_}] {
            return caller.canceled() || caller.deadline.passed();
          };
          value_or_throw(service->when_ready(read_id(in), send, given_up));
        });
  };
  const auto reply_with_nothing = [](RefService&, const std::shared_ptr<Responder>& responder, const std::string&,
                                     const RefValue&, const ContextPtr&) { responder->reply({}); };
  MUSTER_TRY(refs->agent().add_function(kWait, handler(reply_with_nothing), {}));
  return refs->agent().add_function(kFetch, handler(reply_with_value), {});
}

Future fetch(const Ref& ref, const CallOptions& options, const ContextPtr& context) {
  return call_with_refs(*ref.service(), ref.owner(), kFetch, write_id(ref, context), options);
}

Future wait_for_value(const Ref& ref, const CallOptions& options) {
  return call_with_refs(*ref.service(), ref.owner(), kWait, write_id(ref, nullptr), options);
}

void track(const Future& future, const ContextPtr& context) {
  if (!context) return;
  future.then([context](const CallResult& result) {
    const auto record = result ? context_record(*result) : std::nullopt;
    if (record && record->context == context->id()) context->add_received(*record);
  });
}

void expect_parts(ValueReader& in, size_t count) {
  in.expect(Tag::kList);
  if (in.count() == count) return;
  throw_error(Error{ErrorCode::kProtocol, c10::str("the arguments of a call are a list of ", count, " values")});
}

void begin_create(ValueWriter& out, const Ref& ref, const std::string& function) {
  out.begin_list(2);
  out.begin_tuple(5);
  out.put_int(ref.id().creator);
  out.put_int(static_cast<int64_t>(ref.id().number));
  out.put_string(function);
}

std::pair<RefId, std::string> read_create(ValueReader& in, RefService& refs, const WorkerInfo& caller) {
  expect_parts(in, 2);
  in.expect(Tag::kTuple);
  if (in.count() != 5) throw_error(Error{ErrorCode::kProtocol, "a reference is created with five values"});
  RefId id;
  in.expect(Tag::kInt);
  id.creator = static_cast<int>(in.int_value());
  in.expect(Tag::kInt);
  id.number = static_cast<uint64_t>(in.int_value());
  in.expect(Tag::kString);
  std::string function(in.bytes_value());
  if (id.creator != caller.id) {
    throw_error(Error{ErrorCode::kProtocol, caller.to_string() + " names a reference of another worker"});
  }
  if (caller.id != refs.self().id) refs.accept(id, caller);
  return {id, std::move(function)};
}

Future call_with_refs(RefService& refs, const std::string& to, const std::string& function, ValueWriter arguments,
                      const CallOptions& options) {
  auto passed = arguments.take_refs();
  CallOptions left = options;
  if (!passed.empty()) {
    const Deadline deadline = Deadline::after(options.timeout);
    for (const Future& granted : refs.grant(passed, to, RefService::Carrier::kCall, options.timeout)) {
      if (const CallResult& result = granted.wait(); !result) throw_call_error(result.error());
    }
    left.timeout = std::max(deadline.left(), Duration(1ms));
  }
  Future future = refs.agent().call(to, function, arguments.take_for(to), left);
  if (!passed.empty()) future.then([passed = std::move(passed)](const CallResult&) {});
  track(future, arguments.context());
  return future;
}

/// The references are not kept: the owner counts the receiver as a holder for a lease, and it renews once it has read
/// the reply.
void reply_with_refs(RefService& refs, std::shared_ptr<Responder> responder, const std::string& receiver,
                     ValueWriter result) {
  const auto passed = result.take_refs();
  auto message = std::make_shared<Message>(result.take_for(receiver));
  const std::vector<Future> grants = refs.grant(passed, receiver, RefService::Carrier::kReply);
  if (grants.empty()) return responder->reply(std::move(*message));
  struct State {
    std::atomic<size_t> left;
    std::atomic<bool> failed = false;
  };
  const auto state = std::make_shared<State>(grants.size());
  for (const Future& grant : grants) {
    grant.then([passed, responder, message, state](const CallResult& granted) {
      if (!granted && !state->failed.exchange(true)) responder->fail(granted.error());
      if (--state->left == 0 && !state->failed) responder->reply(std::move(*message));
    });
  }
}

}  // namespace muster::rpc
