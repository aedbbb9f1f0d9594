#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "muster/base/error.h"
#include "muster/rpc/message.h"

namespace muster::rpc {

/// A message of a forward pass that carries tensors with gradients. Its sender numbers it.
struct MessageId {
  int sender = -1;
  uint64_t number = 0;

  auto operator<=>(const MessageId&) const = default;
};

/// The part of the graph of a forward pass that one worker has. Its leaves are parameters, and tensors of messages that
/// it has received. Gradients are opaque here; an empty message stands for none.
class LocalGraph {
 public:
  struct Gradients {
    MessageId message;
    Message gradients;
  };
  virtual ~LocalGraph() = default;
  /// Runs all that can run. `arrived`: the gradients of messages that this worker has sent. Returns those of messages
  /// that it has received, each once all of its parts are known. The first call has none, and starts from the roots.
  /// May throw.
  virtual std::vector<Gradients> run(std::vector<Gradients> arrived) = 0;
  /// Called once, after all messages have their gradients. May throw.
  virtual void finish() = 0;
};

/// One backward pass at one worker. Decides what is sent, and when the worker's part has ended. Knows no socket and no
/// tensor. Not thread-safe.
///
/// Each message of the forward pass gets exactly one answer: its gradients, or nothing. A worker that takes part waits
/// for the answers to all messages that it has sent, and answers all that it has received, whether the loss depends on
/// them or not. So nobody needs to know which messages the loss uses, and an unused one cannot make a worker wait
/// forever. No circle of workers can wait for each other, because the gradients of a message depend only on messages
/// that were sent after it was received.
///
/// A worker takes part when the first part of the pass arrives. One that nobody would reach otherwise is asked: a
/// worker that can do nothing more names the messages whose answers it misses (Part::expected). The receiver answers
/// those that it does not know, because they were lost, with nothing.
///
/// The end is found as by Dijkstra and Scholten (1980): each part is acknowledged. The one that made a worker take part
/// is acknowledged when the worker has ended; all others at once. The worker that has begun the pass ends last. If the
/// last part of a worker is for the worker that made it take part, the acknowledgment carries it. So a pass through one
/// call costs one round trip.
class BackwardPass {
 public:
  using Peers = std::map<MessageId, std::string>;
  /// Messages that were sent and received before the pass, and the workers at their other ends.
  BackwardPass(std::unique_ptr<LocalGraph> graph, Peers sent, Peers received);

  /// What one worker sends to another one.
  struct Part {
    std::string to;
    std::optional<LocalGraph::Gradients> answer;
    std::vector<MessageId> expected;  ///< sent to that worker, and not answered yet
  };

  /// A part has arrived from a worker.
  void receive(const std::string& from, std::optional<LocalGraph::Gradients> answer,
               const std::vector<MessageId>& expected);
  /// A message of the forward pass has arrived during this pass: too late to take part, so it is answered with nothing.
  void add_late(MessageId message, const std::string& from);
  /// A part that this worker has sent was acknowledged. If the acknowledgment carries a part: after receive().
  void acknowledge() { --unacknowledged_; }
  /// Asks again for answers that are missing. For a pass that has not moved for a while.
  void ask_again();

  /// Runs the graph if there is something to run: call it in turn with next_part() until both have nothing. `run` must
  /// call graph().run() with what it gets, and may do so without a lock: meanwhile there is nothing to run. Returns the
  /// input, or nothing.
  std::optional<std::vector<LocalGraph::Gradients>> begin_run();
  void end_run(std::vector<LocalGraph::Gradients> answers);
  LocalGraph& graph() { return *graph_; }
  /// Gives the graph away, once is_answered(): nothing runs any more.
  std::unique_ptr<LocalGraph> take_graph() { return std::move(graph_); }
  /// The next part to send.
  std::optional<Part> next_part();
  /// True if all that this worker has left to do is to send one part to `to`. Then take_last_part() gives that part,
  /// for an acknowledgment to carry, and is_ended() is true.
  bool only_owes(const std::string& to) const {
    return is_answered() && unacknowledged_ == 0 && parts_.size() == 1 && parts_.front().to == to;
  }
  Part take_last_part();

  /// True once all messages have their answers: then the caller calls finish() of the graph.
  bool is_answered() const { return !running_ && arrived_.empty() && started_ && waiting_.empty() && owed_.empty(); }
  /// True once all parts that were sent are acknowledged, too.
  bool is_ended() const { return is_answered() && parts_.empty() && unacknowledged_ == 0; }

  /// The workers from which something is missing, for errors: "worker "ps" (2 answers)".
  std::string missing() const;
  /// All workers that this one exchanges parts with.
  std::set<std::string> peers() const;

 private:
  void answer(MessageId message, Message gradients);
  void ask(bool everyone);

  std::unique_ptr<LocalGraph> graph_;
  Peers waiting_;                               ///< messages sent whose answers are missing
  Peers owed_;                                  ///< messages received that were not answered yet
  std::set<MessageId> answered_;                ///< messages received that were answered
  std::set<std::string> contacted_;             ///< workers that know of the pass
  std::vector<LocalGraph::Gradients> arrived_;  ///< the next input of the graph
  std::vector<Part> parts_;                     ///< to send
  bool started_ = false, running_ = false;
  int unacknowledged_ = 0;
};

}  // namespace muster::rpc
