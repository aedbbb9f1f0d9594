#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "muster/base/clock.h"
#include "muster/launch/options/options.h"
#include "muster/launch/rendezvous/rendezvous_messages.h"

namespace muster {

struct RendezvousOptions {
  int min_nodes = 1, max_nodes = 1;
  int max_restarts = 0;
  Duration join_timeout = std::chrono::seconds(300);      ///< for min_nodes to arrive
  Duration last_call = std::chrono::seconds(30);          ///< after the min_nodes-th at the beginning, for more to come
  Duration heartbeat_timeout = std::chrono::seconds(10);  ///< without a sign of life, until a node counts as lost
  Duration stop_timeout = std::chrono::seconds(60);       ///< for a node to end its workers
  int first_generation = 0, restarts = 0;                 ///< more than 0 where an earlier root has died
};
RendezvousOptions rendezvous_options(const RunOptions& options);

/// What the root decides: who is in which generation, when one ends, and how the job does. A state machine that knows
/// no store, thread or clock: calls of nodes and the time go in, news for all nodes come out.
///
/// A generation runs on the nodes that have a place in it. It ends when a worker fails, a node is lost or leaves, or
/// one more comes for which there is room; then all of its nodes stop their workers and say so, and the next begins.
/// A failure counts as a restart, once for all nodes, whoever else fails meanwhile; in an elastic job (min < max) what
/// a change of membership brings about does not count, as with torchrun. Nodes keep their order from one generation to
/// the next. Nodes for which there is no room wait, and take the place of one that is lost.
class JobRendezvous {
 public:
  JobRendezvous(const RendezvousOptions& options, TimePoint now);

  std::vector<JobEvent> handle(const NodeEvent& call, TimePoint now);
  /// To be called at next_tick(), or when nothing else happens.
  std::vector<JobEvent> tick(TimePoint now);
  TimePoint next_tick() const;

  /// After a kStart: the places of its generation, by node id.
  const std::vector<std::pair<std::string, Assignment>>& places() const { return places_; }
  int generation() const { return generation_; }
  int restarts() const { return restarts_; }
  bool over() const { return phase_ == Phase::kOver; }
  /// The job is over, and none of its nodes needs the store any longer.
  bool all_left() const { return over() && nodes_.empty(); }
  /// How many nodes have said goodbye or were lost.
  int departed() const { return departed_; }

  struct NodeView {
    NodeInfo info;
    int node_rank = -1;      ///< -1: not in the generation
    const char* state = "";  ///< "waiting", "running", "done"
    TimePoint heard;
  };
  std::vector<NodeView> nodes() const;
  /// "61 of 64 nodes are here; missing: 7, 12, 40".
  std::string progress() const;

 private:
  enum class Phase { kGathering, kRunning, kStopping, kOver };
  enum class State {
    kRival,    // wants the rank of a node that may or may not be alive
    kWaiting,  // for the next generation
    kRunning,
    kDone,  // all workers have ended well
  };
  struct Node {
    NodeInfo info;
    TimePoint heard;
    int64_t arrival = 0;
    State state = State::kWaiting;
    std::string rival_of{};
    bool leaving = false;
  };
  using Nodes = std::map<std::string, Node>;

  void join(const NodeInfo& info, TimePoint now);
  void hear(Node& node, const NodeEvent& call, TimePoint now);
  void failed(const NodeEvent& call, TimePoint now);
  void leave(Node& node, const NodeEvent& call, TimePoint now);
  void remove(const std::string& id, const std::string& why, TimePoint now);
  void settle_rivals(const std::string& holder, bool holder_lives, TimePoint now);

  void stop(std::string why, TimePoint now);
  void go_on_when_stopped(TimePoint now);
  void gather(TimePoint now);
  void start_when_complete(TimePoint now);
  void start();
  std::vector<Node*> choose();
  void assign(const std::vector<Node*>& chosen);
  void finish(Outcome outcome);

  void look_for_lost(TimePoint now);
  void give_up_gathering();
  void tell(JobEvent news) { news_.push_back(std::move(news)); }
  void set_state(Node& node, State state);
  bool elastic() const { return options_.min_nodes < options_.max_nodes; }
  int eligible() const { return static_cast<int>(nodes_.size()) - rivals_; }
  bool is_full() const { return eligible() >= options_.max_nodes; }
  std::vector<int> missing_ranks() const;
  TimePoint next_scan() const { return last_scan_ + options_.heartbeat_timeout / 5; }

  const RendezvousOptions options_;
  Phase phase_ = Phase::kGathering;
  int generation_, restarts_;
  Nodes nodes_;
  int64_t arrivals_ = 0;
  int rivals_ = 0, running_ = 0, busy_ = 0;  // busy: running or done
  int departed_ = 0;
  bool began_ = false;  // a generation, under this root
  int expected_ = 0;    // nodes that a root before this one has left
  Outcome failure_;     // why the generation stops, if that is a failure
  bool membership_changed_ = false;
  Outcome outcome_;
  TimePoint gather_deadline_, next_progress_, repeat_progress_, last_scan_, stop_deadline_;
  std::string told_progress_;
  TimePoint last_call_{INT64_MAX};
  std::vector<JobEvent> news_;
  std::vector<std::pair<std::string, Assignment>> places_;
};

}  // namespace muster
