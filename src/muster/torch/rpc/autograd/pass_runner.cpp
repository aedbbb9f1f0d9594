#include "muster/torch/rpc/autograd/pass_runner.h"

#include <algorithm>
#include <utility>

#include "muster/torch/rpc/autograd/pass_wire.h"
#include "muster/torch/rpc/remote_error.h"

namespace muster::rpc {
namespace {

/// A worker that has waited for so long asks again for the answers that it misses.
constexpr Duration kAskAgain = 500ms;
/// A wait for parts looks for changes by other threads so often.
constexpr Duration kLookInterval = 50ms;

CallError aborted(std::string why) { return CallError{Error{ErrorCode::kAborted, std::move(why)}, {}, {}}; }

}  // namespace

PassRunner::PassRunner(std::shared_ptr<Agent> agent, const Options& options, std::unique_ptr<BackwardPass> pass)
    : agent_(std::move(agent)), options_(options), pass_(std::move(pass)), moved_(steady_clock().now()) {}

bool PassRunner::has_ended() const {
  const std::lock_guard lock(mutex_);
  return phase_ == Phase::kFailed || (phase_ == Phase::kAnswered && pass_->is_ended());
}

void PassRunner::start() {
  Lock lock(mutex_);
  advance(lock);
}

/// This thread drives the agent's links, queues the parts that arrive, and runs them. Another thread would have to be
/// woken for each part.
bool PassRunner::wait_until(const Deadline& until) {
  while (!has_ended() && !until.passed()) {
    const Deadline soon = Deadline::at(std::min(until.when(), steady_clock().now() + kLookInterval));
    agent_->wait_until([this] { return news_.load(); }, soon);
    Lock lock(mutex_);
    news_ = false;
    advance(lock);
  }
  return has_ended();
}

void PassRunner::check() const {
  const std::lock_guard lock(mutex_);
  if (thrown_) std::rethrow_exception(thrown_);
  if (error_) throw_call_error(*error_);
}

void PassRunner::receive(const Request& request, Responder responder, std::optional<LocalGraph::Gradients> answer,
                         const std::vector<MessageId>& expected) {
  Lock lock(mutex_);
  if (phase_ == Phase::kFailed) {
    const CallError why = *error_;
    lock.unlock();
    return responder.fail(why);
  }
  moved_ = steady_clock().now();
  pass_->receive(request.from.name, std::move(answer), expected);
  // The worker that has begun the pass waits for nobody, so it is never engaged.
  if (begins_here()) {
    news_ = true;
    lock.unlock();
    return responder.reply({});
  }
  const bool engages = !engaged_by_;
  if (engages) {
    engaged_by_.emplace(
        Engagement{{request.from, request.function, {}, request.deadline, request.canceled_}, std::move(responder)});
  }
  advance(lock);
  lock.unlock();
  if (!engages) responder.reply({});
}

void PassRunner::add_late(const MessageId& message, const std::string& from) {
  Lock lock(mutex_);
  if (phase_ != Phase::kRunning) return;
  pass_->add_late(message, from);
  advance(lock);
}

/// Only one thread at a time is here. The others leave their work to it.
void PassRunner::advance(Lock& lock) {
  if (std::exchange(advancing_, true)) return;
  while (phase_ != Phase::kFailed && step(lock)) {
  }
  advancing_ = false;
  if (may_end()) end(lock);
}

bool PassRunner::step(Lock& lock) {
  const auto unlocked = [&](const auto& run) {
    lock.unlock();
    try {
      run();
      lock.lock();
    } catch (...) {
      const CallError error = options_.describe();
      lock.lock();
      fail(lock, error, std::current_exception());
    }
  };
  if (auto arrived = pass_->begin_run()) {
    std::vector<LocalGraph::Gradients> answers;
    unlocked([&] { answers = pass_->graph().run(std::move(*arrived)); });
    pass_->end_run(std::move(answers));
    return true;
  }
  if (!only_owes_reply()) {
    if (auto part = pass_->next_part()) {
      unlocked([&] { send(std::move(*part)); });
      return true;
    }
  }
  if (phase_ != Phase::kRunning || !pass_->is_answered()) return false;
  unlocked([graph = pass_->take_graph()] { graph->finish(); });
  if (phase_ == Phase::kRunning) phase_ = Phase::kAnswered;
  return true;
}

Message PassRunner::message_of(BackwardPass::Part part) const {
  return encode(
      PassPart{options_.context, options_.id, options_.retain_graph, std::move(part.answer), std::move(part.expected)});
}

void PassRunner::send(BackwardPass::Part part) {
  const std::string to = part.to;
  const CallOptions options{.timeout = std::max(options_.deadline.left(), Duration(1ms))};
  const Future sent = agent_->call(to, kPassPart, message_of(std::move(part)), options);
  sent.then([self = shared_from_this(), to](const CallResult& result) { self->on_acknowledged(to, result); });
}

/// A callback must be short, so what an acknowledgment carries is run elsewhere: by wait_until(), or by a new task.
void PassRunner::on_acknowledged(const std::string& by, const CallResult& result) {
  Lock lock(mutex_);
  if (result && !result->head.empty()) {
    Result<PassPart> part = decode_part(*result);
    if (!part) return fail(lock, CallError{part.error(), {}, {}}, nullptr);
    moved_ = steady_clock().now();
    pass_->receive(by, std::move(part->answer), part->expected);
    pass_->acknowledge();
    if (begins_here()) {
      news_ = true;
      return;
    }
    lock.unlock();
    return agent_->post([self = shared_from_this()] {
      Lock lock(self->mutex_);
      self->advance(lock);
    });
  }
  pass_->acknowledge();
  if (!result) return fail(lock, result.error(), nullptr);
  if (!advancing_ && may_end()) end(lock);
}

void PassRunner::end(Lock& lock) {
  news_ = true;
  if (!engaged_by_) return;
  Message reply;
  if (only_owes_reply()) reply = message_of(pass_->take_last_part());
  std::optional<Engagement> engaged_by = std::exchange(engaged_by_, std::nullopt);
  lock.unlock();
  engaged_by->responder.reply(std::move(reply));
  lock.lock();
}

void PassRunner::fail(CallError why) {
  Lock lock(mutex_);
  fail(lock, std::move(why), nullptr);
}

void PassRunner::fail(Lock& lock, CallError why, std::exception_ptr thrown) {
  if (phase_ == Phase::kFailed || (phase_ == Phase::kAnswered && pass_->is_ended())) return;
  phase_ = Phase::kFailed;
  error_ = std::move(why);
  thrown_ = std::move(thrown);
  news_ = true;
  std::optional<Engagement> engaged_by = std::exchange(engaged_by_, std::nullopt);
  const std::set<std::string> peers = pass_->peers();
  const Message abort = encode(PassAbort{options_.context, options_.id, *error_});
  const CallError reason = *error_;
  lock.unlock();
  if (engaged_by) engaged_by->responder.fail(reason);
  for (const std::string& peer : peers) {
    (void)agent_->call(peer, kPassAbort, abort, {.timeout = 5s, .one_way = true});
  }
  lock.lock();
}

void PassRunner::look_after() {
  Lock lock(mutex_);
  if (phase_ == Phase::kFailed || (phase_ == Phase::kAnswered && pass_->is_ended())) return;
  if (options_.deadline.passed()) {
    const std::string missing = pass_->missing();
    const std::string why = "the backward pass has not ended in time" +
                            (missing.empty() ? std::string() : "; gradients are missing from " + missing);
    return fail(lock, CallError{Error{ErrorCode::kTimeout, why}, {}, {}}, nullptr);
  }
  if (engaged_by_ && engaged_by_->request.canceled()) {
    return fail(lock, aborted(engaged_by_->request.from.to_string() + " does not wait for its backward pass any more"),
                nullptr);
  }
  if (phase_ != Phase::kRunning || steady_clock().now() - moved_ < kAskAgain) return;
  moved_ = steady_clock().now();
  pass_->ask_again();
  advance(lock);
}

}  // namespace muster::rpc
