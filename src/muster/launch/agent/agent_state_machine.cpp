#include "muster/launch/agent/agent_state_machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>

#include "muster/launch/failure.h"
#include "muster/launch/signals.h"

namespace muster {

void AgentStateMachine::root_found(RootInfo root) {
  if (outcome_) return;
  root_ = std::move(root);
  phase_ = AgentPhase::kJoining;
  actions_.join();
}

void AgentStateMachine::root_not_found(Outcome outcome) {
  if (!root_loss_.empty()) outcome = {1, root_loss_};
  finish_without_root(std::move(outcome));
}

// If this node's workers failed earlier, that failure says more than `outcome` and may be its reason.
void AgentStateMachine::finish_without_root(Outcome outcome) {
  if (failure_) outcome = {failure_->status, failure_->report + "\n  also " + outcome.report};
  finish(std::move(outcome));
}

void AgentStateMachine::root_lost(const Error& why) {
  const bool reconnects = phase_ == AgentPhase::kStopping && after_stop_ == AfterStop::kReconnect;
  if (outcome_ || reconnects || phase_ == AgentPhase::kConnecting) return;  // several threads may report the same loss
  if (why.code == ErrorCode::kProtocol) return end({1, why.message});
  root_loss_.clear();
  if (!root_.moves) {
    root_loss_ = fmt::format(
        "lost the job's store at {}: the `muster run` there has ended, or its host cannot be reached", root_.url);
    if (root_.direct) return finish_without_root({1, root_loss_});
  }
  say(fmt::format("lost the job's root at {} ({}): looking for {}", root_.url, why.message,
                  root_.moves ? "its successor" : "it without the proxy between"));
  stop(AfterStop::kReconnect);
}

void AgentStateMachine::job_event(const JobEvent& event, const std::optional<Assignment>& assignment) {
  const bool is_outcome = event.kind == JobEvent::Kind::kOutcome;
  if (outcome_ || (phase_ == AgentPhase::kConnecting && !is_outcome)) return;  // the event is from a root that was lost
  switch (event.kind) {
    case JobEvent::Kind::kStart:
      if (assignment) return start(*assignment, event.text);
      return say("the job is full: this node waits for a free place");
    case JobEvent::Kind::kStop:
      if (!has_workers() || event.generation != generation_) return;
      say(event.text);
      return stop(AfterStop::kNextGeneration);
    case JobEvent::Kind::kOutcome:
      return finish(event.outcome);
    case JobEvent::Kind::kRefused:
      return finish({1, event.text});
    case JobEvent::Kind::kEvicted:
      say("the job's root has evicted this node after missed heartbeats: joining again");
      return stop(AfterStop::kRejoin);
    case JobEvent::Kind::kMoved:
      root_loss_.clear();
      say("the job's root at " + root_.url + " leaves: looking for its successor");
      return stop(AfterStop::kReconnect);
    case JobEvent::Kind::kProgress:
      if (!has_workers()) actions_.progress(event.text);
  }
}

void AgentStateMachine::start(const Assignment& assignment, const std::string& text) {
  if (phase_ != AgentPhase::kJoining) return;
  phase_ = AgentPhase::kRunning;
  generation_ = assignment.generation;
  failure_.reset();
  if (generation_ > 0) say(fmt::format("generation {} begins: {}", generation_, text));
  if (const auto started = actions_.start_workers(assignment); !started) start_failed(started.error());
}

void AgentStateMachine::stop(AfterStop next) {
  const bool has_reason = phase_ == AgentPhase::kLeaving || phase_ == AgentPhase::kStopping;
  after_stop_ = has_reason ? std::max(after_stop_, next) : next;
  if (!has_workers()) return continue_after_stop();
  phase_ = AgentPhase::kStopping;
  actions_.stop_workers(SIGTERM);
}

void AgentStateMachine::workers_gone() {
  if (phase_ == AgentPhase::kEnding) phase_ = AgentPhase::kDone;
  if (phase_ != AgentPhase::kStopping && phase_ != AgentPhase::kLeaving) return;
  phase_ = AgentPhase::kJoining;
  // After an eviction the root no longer knows this node, so it expects no kStopped.
  if (after_stop_ != AfterStop::kRejoin) send(NodeEvent::Kind::kStopped);
  continue_after_stop();
}

void AgentStateMachine::continue_after_stop() {
  switch (after_stop_) {
    case AfterStop::kNextGeneration:
      return;
    case AfterStop::kRejoin:
      return actions_.join();
    case AfterStop::kReconnect:
      phase_ = AgentPhase::kConnecting;
      return actions_.reconnect();
    case AfterStop::kLeave:
      left_ = true;
      return finish({128 + SIGTERM, ""});
  }
}

void AgentStateMachine::worker_failed(Outcome failure) {
  failure_ = std::move(failure);
  send(NodeEvent::Kind::kFailed, *failure_);
}

void AgentStateMachine::signaled(int number, bool monitor_is_gone) {
  const bool leaves = has_workers() && !outcome_ && after_stop_ == AfterStop::kLeave;
  // If the monitor is gone, no user waits for the job. A second signal means that the user does not want to wait.
  if (monitor_is_gone || leaves || (outcome_ && outcome_->status != 0)) actions_.kill_workers();
  if (monitor_is_gone) return end({128 + SIGKILL, "`muster run` was killed on host " + host_});
  if (leaves) return stop(AfterStop::kLeave);
  const std::string signal = signal_name(number) + " on host " + host_;
  const bool has_root = phase_ != AgentPhase::kConnecting;
  // SIGTERM means that the system takes this host away. An elastic job continues if enough other nodes are left.
  const bool can_leave = has_root && (!root_.is_here || root_.may_leave);
  if (number == SIGTERM && elastic_ && can_leave) return leave(number, signal);
  const int for_workers = is_forwarded(number) ? number : SIGTERM;
  end({128 + number, signal + ": stopping the workers (once more kills them)"}, for_workers);
}

void AgentStateMachine::leave(int number, const std::string& signal) {
  if (outcome_) return;
  say(signal + ": this node leaves the job (once more kills its workers)");
  send(NodeEvent::Kind::kLeave, {128 + number, signal + ": it leaves the job"});
  after_stop_ = AfterStop::kLeave;
  if (phase_ == AgentPhase::kRunning) phase_ = AgentPhase::kLeaving;
  if (!has_workers()) continue_after_stop();
}

void AgentStateMachine::start_failed(const Error& error) {
  end({exit_status(error), error.message + " (host " + host_ + ")"});
}

void AgentStateMachine::end(Outcome outcome, int signal) {
  if (outcome_) return;
  send(NodeEvent::Kind::kEnd, outcome);
  finish(std::move(outcome), signal);
}

void AgentStateMachine::finish(Outcome outcome, int signal) {
  if (outcome_) return;
  outcome_ = std::move(outcome);
  say(outcome_->report);
  const bool stops = has_workers();
  phase_ = stops ? AgentPhase::kEnding : AgentPhase::kDone;
  if (stops && outcome_->status != 0) actions_.stop_workers(signal);  // after a success, workers end by themselves
}

void AgentStateMachine::send(NodeEvent::Kind kind, Outcome outcome) {
  actions_.send({.kind = kind, .generation = generation_, .outcome = std::move(outcome)});
}

// The same report may arrive twice: as the reason to stop a generation, and as the job's outcome.
void AgentStateMachine::say(const std::string& text) {
  if (!text.empty() && text != last_notice_) actions_.notice(text);
  last_notice_ = text;
}

}  // namespace muster
