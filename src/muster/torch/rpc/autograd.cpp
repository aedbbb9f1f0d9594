// The functions that workers call at each other for distributed autograd. autograd/pass_wire.h has those of a pass.
//
//   muster.autograd.release  context:i64  the context has ended
//   muster.autograd.exists   context:i64  asks its creator; kNotFound if it has ended
#include "muster/torch/rpc/autograd.h"

#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/variable.h>
#include <unistd.h>

#include <algorithm>
#include <limits>

#include "muster/torch/exception.h"
#include "muster/torch/rpc/autograd/context.h"
#include "muster/torch/rpc/autograd/pass_wire.h"
#include "muster/torch/rpc/remote_error.h"
#include "muster/torch/rpc/worker.h"

namespace muster::rpc {
namespace {

constexpr const char* kRelease = "muster.autograd.release";
constexpr const char* kExists = "muster.autograd.exists";
/// How often passes are looked after.
constexpr Duration kInterval = 100ms;
/// A context that was not used for so long may belong to a worker that has died, or its end may have been lost.
constexpr Duration kIdle = 60s;
/// The longest wait for an answer about that.
constexpr Duration kAnswerTime = 5s;

Message id_message(int64_t id) {
  Writer out;
  out.put(id);
  return {out.take(), {}};
}
Result<int64_t> read_id(const Message& message) {
  Reader in(message.head);
  MUSTER_ASSIGN(const auto id, in.get<int64_t>());
  MUSTER_TRY(in.finish());
  return id;
}

CallError to_call_error(Error error) { return CallError{std::move(error), {}, {}}; }

std::string ended(int64_t id) {
  return c10::str("context ", id, " of distributed autograd has ended, or was never here");
}

}  // namespace

Autograd::Autograd(std::shared_ptr<Agent> agent, Describe describe)
    : agent_(std::move(agent)), describe_(describe), pid_(getpid()) {}
Autograd::~Autograd() { stop(); }

Result<std::shared_ptr<Autograd>> Autograd::start(std::shared_ptr<Agent> agent, Describe describe) {
  const std::shared_ptr<Autograd> autograd(new Autograd(std::move(agent), describe));
  MUSTER_TRY(autograd->add_functions());
  return autograd;
}

Result<> Autograd::add_functions() {
  const auto guarded = [weak = weak_from_this()](auto body) -> Handler {
    return [weak, body](const Request& request, Responder responder) {
      const auto alive = weak.lock();
      if (!alive) {
        return responder.fail(
            to_call_error({ErrorCode::kAborted, "this worker has ended its part in autograd", kNoRank, {}}));
      }
      try {
        body(*alive, request, std::move(responder));
      } catch (...) {
        responder.fail(current_call_error());
      }
    };
  };
  MUSTER_TRY(agent_->add_function(kPassPart, guarded([](Autograd& self, const Request& request, Responder&& responder) {
                                    self.receive_part(request, std::move(responder));
                                  }),
                                  {.brief = true}));
  MUSTER_TRY(agent_->add_function(kPassAbort,
                                  guarded([](Autograd& self, const Request& request, Responder&& responder) {
                                    self.receive_abort(request);
                                    responder.reply({});
                                  }),
                                  {}));
  MUSTER_TRY(agent_->add_function(kRelease, guarded([](Autograd& self, const Request& request, Responder&& responder) {
                                    self.release(value_or_throw(read_id(request.arguments)), request.from.name);
                                    responder.reply({});
                                  }),
                                  {}));
  return agent_->add_function(kExists, guarded([](Autograd& self, const Request& request, Responder&& responder) {
                                (void)self.find(value_or_throw(read_id(request.arguments)));
                                responder.reply({});
                              }),
                              {.idempotent = true});
}

// ---- contexts

ContextPtr Autograd::create() {
  uint32_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = ++created_;
  }
  return insert((static_cast<int64_t>(agent_->self().id) << 32) | number);
}

/// A call that comes late must not bring back a context that has ended at the worker that created it.
ContextPtr Autograd::find_or_create(int64_t id) { return id >> 32 == agent_->self().id ? find(id) : insert(id); }

ContextPtr Autograd::insert(int64_t id) {
  const std::lock_guard lock(mutex_);
  ContextPtr& context = contexts_[id];
  if (!context) context = std::make_shared<AutogradContext>(id, agent_->self());
  if (!thread_.joinable() && !stopped_) thread_ = std::thread([this] { run(); });
  return context;
}

ContextPtr Autograd::find(int64_t id) const {
  const std::lock_guard lock(mutex_);
  const auto found = contexts_.find(id);
  if (found == contexts_.end()) throw_error(Error{ErrorCode::kNotFound, ended(id)});
  return found->second;
}

bool Autograd::contains(int64_t id) const {
  const std::lock_guard lock(mutex_);
  return contexts_.contains(id);
}

ContextPtr Autograd::context_of(const Message& arguments) {
  const auto record = context_record(arguments);
  return record ? find_or_create(record->context) : nullptr;
}

void Autograd::release(const ContextPtr& context) { release(context->id(), {}); }

void Autograd::release(int64_t id, const std::string& except) {
  ContextPtr context;
  {
    const std::lock_guard lock(mutex_);
    const auto found = contexts_.extract(id);
    if (found.empty()) return;
    context = found.mapped();
  }
  if (const auto pass = context->pass()) pass->fail(to_call_error({ErrorCode::kAborted, ended(id), kNoRank, {}}));
  for (const std::string& peer : context->peers()) {
    if (peer == except || peer == agent_->self().name) continue;
    (void)agent_->call(peer, kRelease, id_message(id), {.timeout = kAnswerTime, .one_way = true});
  }
}

size_t Autograd::count() const {
  const std::lock_guard lock(mutex_);
  return contexts_.size();
}

// ---- backward passes

std::shared_ptr<PassRunner> Autograd::begin_backward(const ContextPtr& context, const std::vector<at::Tensor>& roots,
                                                     const BackwardOptions& options) {
  AutogradContext::Roots begin;
  for (const at::Tensor& root : roots) {
    if (!root.defined() || !root.requires_grad()) {
      throw_error(Error{ErrorCode::kInvalidArgument, "a loss must require gradients: it depends on no parameter"});
    }
    if (root.numel() != 1) {
      throw_error(Error{ErrorCode::kInvalidArgument,
                        c10::str("a loss must have one element, this one has the sizes ", root.sizes())});
    }
    begin.emplace_back(::torch::autograd::impl::gradient_edge(root), at::ones_like(root));
  }
  PassId id{agent_->self().id, 0};
  {
    const std::lock_guard lock(mutex_);
    id.number = ++passes_;
  }
  const PassRunner::Options begun{context->id(), id, options.retain_graph, Deadline::after(options.timeout), describe_};
  auto pass = value_or_throw(context->begin_pass(agent_, begun, std::move(begin)));
  pass->start();
  return pass;
}

/// The worker that has begun the pass only queues the part, so that needs no thread of its own. Others run their graph.
void Autograd::receive_part(const Request& request, Responder&& responder) {
  PassPart part = value_or_throw(decode_part(request.arguments));
  if (part.pass.initiator == agent_->self().id) {
    // A part of a pass that has failed must not bring its context back.
    const auto pass = find(part.context)->pass();
    if (!pass || pass->id() != part.pass) {
      return responder.fail(to_call_error({ErrorCode::kNotFound, ended(part.context), kNoRank, {}}));
    }
    return take_part(request, std::move(responder), std::move(part));
  }
  struct Arrived {
    Request request;
    Responder responder;
    PassPart part;
  };
  const auto arrived =
      std::make_shared<Arrived>(Arrived{{request.from, request.function, {}, request.deadline, request.canceled_},
                                        std::move(responder),
                                        std::move(part)});
  agent_->post([self = shared_from_this(), arrived] {
    try {
      self->take_part(arrived->request, std::move(arrived->responder), std::move(arrived->part));
    } catch (...) {
      arrived->responder.fail(current_call_error());
    }
  });
}

/// The part may come before the call that makes the context known here, because nobody has waited for that call.
void Autograd::take_part(const Request& request, Responder&& responder, PassPart part) {
  if (part.answer && part.answer->message.sender != agent_->self().id) {
    throw_error(Error{ErrorCode::kPeerLost, "worker \"" + agent_->self().name +
                                                "\" was started again: what it computed in the forward pass is lost"});
  }
  const PassRunner::Options options{part.context, part.pass, part.retain_graph, request.deadline, describe_};
  const auto pass = find_or_create(part.context)->begin_pass(agent_, options, {});
  if (!pass) return responder.fail(to_call_error(pass.error()));
  (*pass)->receive(request, std::move(responder), std::move(part.answer), part.expected);
}

void Autograd::receive_abort(const Request& request) {
  const PassAbort abort = value_or_throw(decode_abort(request.arguments));
  const auto pass = find(abort.context)->pass();
  if (pass && pass->id() == abort.pass) {
    pass->fail(abort.why);  // it may arrive before the answer to a part, which has the same error
  }
}

bool wait_for_pass(PassRunner& pass, const Deadline& deadline) {
  if (!pass.wait_until(deadline)) return false;
  pass.check();
  return true;
}

void abort_pass(PassRunner& pass, const std::string& why) {
  pass.fail(to_call_error({ErrorCode::kAborted, why, kNoRank, {}}));
}

int64_t context_id(const AutogradContext& context) { return context.id(); }

std::vector<std::pair<at::Tensor, at::Tensor>> gradients_of(const AutogradContext& context) {
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients;
  for (const LeafGradient& each : context.gradients()) gradients.emplace_back(each.leaf, each.gradient);
  return gradients;
}

// ---- what is left over

void Autograd::run() {
  for (std::unique_lock lock(mutex_); !stopped_;) {
    changed_.wait_for(lock, contexts_.empty() ? kIdle : kInterval);
    if (stopped_ || contexts_.empty()) continue;
    lock.unlock();
    look_after();
    lock.lock();
  }
}

void Autograd::look_after() {
  std::vector<ContextPtr> contexts;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, context] : contexts_) contexts.push_back(context);
  }
  for (const ContextPtr& context : contexts) {
    if (const auto pass = context->pass()) pass->look_after();
  }
  const TimePoint now = steady_clock().now();
  std::erase_if(contexts, [&](const ContextPtr& context) {
    return context->creator() == agent_->self().id || now - context->last_used() < kIdle;
  });
  if (!contexts.empty()) drop_abandoned(contexts);
}

/// Asks the creators of contexts that nobody has used for long. A creator that has died may still be in the list. The
/// answers are not waited for: passes have deadlines meanwhile.
void Autograd::drop_abandoned(const std::vector<ContextPtr>& idle) {
  const auto workers = agent_->workers(Deadline::after(kAnswerTime));
  if (!workers) return;
  for (const ContextPtr& context : idle) {
    context->touch();
    const auto creator = std::ranges::find(*workers, context->creator(), &WorkerInfo::id);
    if (creator == workers->end()) {
      release(context->id(), {});
      continue;
    }
    agent_->call(creator->name, kExists, id_message(context->id()), {.timeout = kAnswerTime})
        .then([weak = weak_from_this(), id = context->id()](const CallResult& answer) {
          if (answer) return;
          const ErrorCode code = answer.error().error.code;
          if (code != ErrorCode::kNotFound && code != ErrorCode::kPeerLost) return;
          if (const auto alive = weak.lock()) alive->release(id, {});
        });
  }
}

void Autograd::stop() {
  if (pid_ != getpid()) {
    if (thread_.joinable()) thread_.detach();  // tidy: allow(detach) a forked child has no such thread
    return;
  }
  std::unordered_map<int64_t, ContextPtr> contexts;
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
    thread.swap(thread_);  // two threads may call stop()
  }
  if (thread.joinable()) thread.join();
  const std::lock_guard lock(mutex_);
  contexts_.swap(contexts);
}

// ---- the user's side

ContextPtr& CurrentContext::current() {
  thread_local ContextPtr context;
  return context;
}

AutogradScope::AutogradScope(const Worker& worker)
    : autograd_(worker.autograd()), context_(autograd_->create()), current_(std::in_place, context_) {}

AutogradScope::~AutogradScope() {
  current_.reset();
  autograd_->release(context_);
}

int64_t AutogradScope::id() const { return context_->id(); }

void AutogradScope::backward(const std::vector<at::Tensor>& losses, const BackwardOptions& options) const {
  (void)wait_for_pass(*autograd_->begin_backward(context_, losses, options), Deadline::never());
}

at::Tensor AutogradScope::gradient(const at::Tensor& parameter) const {
  for (const LeafGradient& each : context_->gradients()) {
    if (each.leaf.is_same(parameter)) return each.gradient;
  }
  return {};
}

}  // namespace muster::rpc
