#pragma once

#include <csignal>
#include <optional>
#include <string>

#include "muster/launch/rendezvous/rendezvous_messages.h"

namespace muster {

enum class AgentPhase {
  kConnecting,  ///< looks for the job's root; there are no workers
  kJoining,     ///< waits for a generation in which this node has a place; there are no workers
  kRunning,     ///< workers of a generation were started; they may have ended since
  kLeaving,     ///< as kRunning; this node has told the root that it leaves, and the root stops the generation
  kStopping,    ///< workers are being stopped; AfterStop says what follows
  kEnding,      ///< the outcome is known, and workers are being stopped
  kDone,        ///< the outcome is known, and there are no workers
};

/// Actions that the state machine requests from the agent. They must not call the state machine.
class AgentActions {
 public:
  virtual ~AgentActions() = default;
  /// Disconnects from the root that was lost or moves, and looks for the next one. root_found() or root_not_found()
  /// follows.
  virtual void reconnect() = 0;
  virtual void join() = 0;
  /// Sends an event to the root. Without a root the event is dropped.
  virtual void send(NodeEvent event) = 0;
  /// Events of these workers follow. Events of an earlier generation do not arrive any more.
  virtual Result<> start_workers(const Assignment& assignment) = 0;
  /// Sends this signal to all workers, and SIGKILL after the shutdown timeout. workers_gone() follows.
  virtual void stop_workers(int number) = 0;
  /// Sends SIGKILL to all workers.
  virtual void kill_workers() = 0;
  virtual void notice(const std::string& text) = 0;
  /// Shows what the job waits for.
  virtual void progress(const std::string& text) = 0;
};

/// Where the root is, and what its loss means for this node.
struct RootInfo {
  std::string url;
  bool is_here = false;    ///< this node is the root
  bool moves = false;      ///< another node becomes the root when this one is lost
  bool may_leave = false;  ///< an elastic job goes on at another root if this one leaves
  bool direct = true;      ///< no other node's proxy is between this node and the root
};

/// Decides what one node's agent does, from the first search for the root to the job's outcome. It uses no store, no
/// process, no thread and no clock: it takes events and calls AgentActions.
///
///   phase        event                                        next phase
///   kConnecting  root found                                   kJoining
///                root not found                               kDone
///   kJoining     start                                        kRunning
///                evicted                                      kJoining (joins again)
///                root lost or moved                           kConnecting
///                SIGTERM of an elastic job's node (1)         kDone (tells the root that it leaves)
///   kRunning     stop, evicted, root lost or moved            kStopping
///                SIGTERM of an elastic job's node (1)         kLeaving
///   kLeaving     stop, evicted, root lost or moved,
///                second signal                                kStopping
///   kStopping    workers gone: generation was stopped         kJoining
///                              evicted                        kJoining (joins again)
///                              root lost or moved             kConnecting
///                              this node leaves               kDone
///   with workers an outcome, or a signal                      kEnding
///   without      an outcome, or a signal                      kDone
///   kEnding      workers gone                                 kDone
///
/// (1) A root that may not leave ends the job.
class AgentStateMachine {
 public:
  AgentStateMachine(AgentActions& actions, std::string host, bool elastic)
      : actions_(actions), host_(std::move(host)), elastic_(elastic) {}

  void root_found(RootInfo root);
  /// `outcome`: the job's outcome, unless the loss of an earlier root or a failed worker explains more.
  void root_not_found(Outcome outcome);
  void root_lost(const Error& why);
  void job_event(const JobEvent& event, const std::optional<Assignment>& assignment);
  void workers_succeeded() { send(NodeEvent::Kind::kDone); }
  /// The first worker of the current generation has failed.
  void worker_failed(Outcome failure);
  /// No process of the current generation is left on this node. May be called several times.
  void workers_gone();
  /// A signal that ends the job. `monitor_is_gone`: it says that the agent's monitor was killed.
  void signaled(int number, bool monitor_is_gone);
  /// Ends the job for a reason that only this node knows. This node's workers get the signal.
  void end(Outcome outcome, int signal = SIGTERM);
  /// Ends the job because this node's workers cannot be started.
  void start_failed(const Error& error);
  /// Ends only this node.
  void finish(Outcome outcome, int signal = SIGTERM);

  AgentPhase phase() const { return phase_; }
  bool has_workers() const { return phase_ >= AgentPhase::kRunning && phase_ <= AgentPhase::kEnding; }
  /// The failure of this generation's workers on this node.
  const std::optional<Outcome>& failure() const { return failure_; }
  /// The job's outcome, set from kEnding on.
  const std::optional<Outcome>& outcome() const { return outcome_; }
  /// True if this node has left the job and was its root. The job goes on when this node's connection is closed.
  bool hands_over() const { return left_ && root_.is_here; }

 private:
  /// In ascending order of priority.
  enum class AfterStop { kNextGeneration, kRejoin, kReconnect, kLeave };

  void start(const Assignment& assignment, const std::string& text);
  void stop(AfterStop next);
  void continue_after_stop();
  void leave(int number, const std::string& signal);
  void finish_without_root(Outcome outcome);
  void send(NodeEvent::Kind kind, Outcome outcome = {});
  void say(const std::string& text);

  AgentActions& actions_;
  const std::string host_;
  const bool elastic_;
  AgentPhase phase_ = AgentPhase::kConnecting;
  AfterStop after_stop_ = AfterStop::kNextGeneration;  // used while kLeaving and kStopping
  int generation_ = 0;                                 // the last generation in which this node had a place
  RootInfo root_;
  std::string root_loss_;  // why the root was lost, while the agent reconnects to a root that does not move
  std::string last_notice_;
  std::optional<Outcome> failure_, outcome_;
  bool left_ = false;  // this node has ended, and the job has not
};

}  // namespace muster
