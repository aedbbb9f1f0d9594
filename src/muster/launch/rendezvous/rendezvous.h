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
  Duration join_timeout = std::chrono::seconds(300);      ///< time for min_nodes to join
  Duration last_call = std::chrono::seconds(30);          ///< time for more nodes, after min_nodes have joined
  Duration heartbeat_timeout = std::chrono::seconds(10);  ///< a node is lost after this time without a heartbeat
  Duration stop_timeout = std::chrono::seconds(60);       ///< time for a node to end its workers
  Duration join_delay{};     ///< time from the first node that joins a running generation to the end of the generation
  Duration restart_delay{};  ///< the longest pause before a restart, see JobRendezvous
  int first_generation = 0, restarts = 0;  ///< > 0 after an earlier root has died
};
RendezvousOptions rendezvous_options(const RunOptions& options);

/// Makes the root's decisions: which nodes are in a generation, when a generation ends, and the job's outcome. This
/// state machine uses no store, thread or clock: it takes events of nodes and the time, and returns events for all
/// nodes.
///
/// A generation ends when a worker fails, when a node is lost or leaves, or when a node joins and there is room for it.
/// Then all nodes of the generation stop their workers and report this, and the next generation starts. A failure
/// counts as one restart, no matter how many workers fail. In an elastic job (min < max) a change of membership does
/// not count as a restart, as with torchrun. Nodes keep their order between generations. Nodes without room wait, and
/// replace a node that is lost.
///
/// A root may leave a job that goes on. It tells all nodes, also those that join later, where the next root is found.
///
/// Each restart interrupts all nodes. So a generation that nodes join ends only after `join_delay`, or when there is no
/// more room. If generations fail one after the other, each within 10 s, the second restart waits 1 s, and each further
/// one waits twice as long, up to `restart_delay`.
///
/// It has more than 12 fields and 15 private functions, because they are the protocol of one object, the job. The
/// functions are short.
class JobRendezvous {
 public:
  JobRendezvous(const RendezvousOptions& options, TimePoint now);

  std::vector<JobEvent> handle(const NodeEvent& event, TimePoint now);
  /// Call it at next_tick().
  std::vector<JobEvent> tick(TimePoint now);
  TimePoint next_tick() const;

  /// After a kStart: the assignments of its generation, by node id.
  const std::vector<std::pair<std::string, Assignment>>& assignments() const { return assignments_; }
  int generation() const { return generation_; }
  int restarts() const { return restarts_; }
  bool over() const { return phase_ == Phase::kOver; }
  /// True if no node needs this root's store any more: the job is over, or goes on at another root.
  bool all_left() const;
  /// The number of nodes that have left or were lost.
  int departed() const { return departed_; }

  struct NodeView {
    NodeInfo info;
    int node_rank = -1;      ///< -1: not in the generation
    const char* state = "";  ///< "waiting", "running", "done"
    TimePoint last_heard;
  };
  std::vector<NodeView> nodes() const;
  /// "61 of 64 nodes are here; missing: 7, 12, 40".
  std::string progress() const;

 private:
  enum class Phase { kGathering, kRunning, kStopping, kMoved, kOver };
  enum class State {
    kDuplicate,  // asks for the rank of a node that may be dead
    kWaiting,    // waits for the next generation
    kRunning,
    kDone,  // all its workers have succeeded
  };
  struct Node {
    NodeInfo info;
    TimePoint last_heard;
    int64_t arrival = 0;
    State state = State::kWaiting;
    std::string duplicate_of{};
    bool leaving = false;
  };
  using Nodes = std::map<std::string, Node>;

  void join(const NodeInfo& info, TimePoint now);
  void on_event(Node& node, const NodeEvent& event, TimePoint now);
  void failed(const NodeEvent& event, TimePoint now);
  void leave(Node& node, const NodeEvent& event, TimePoint now);
  void remove(const std::string& id, const std::string& why, TimePoint now);
  void move(const std::string& next_root);
  void settle_duplicates(const std::string& holder, bool holder_lives, TimePoint now);

  void stop(std::string why, TimePoint now);
  bool has_room() const;
  void admit(TimePoint now);
  Duration pause_before_restart() const;
  void continue_when_stopped(TimePoint now);
  void gather(TimePoint now, Duration pause = {});
  void start_when_complete(TimePoint now);
  void start(TimePoint now);
  std::vector<Node*> choose();
  void assign(const std::vector<Node*>& chosen);
  void finish(Outcome outcome);

  void check_heartbeats(TimePoint now);
  void fail_gathering();
  void emit(JobEvent event) { events_.push_back(std::move(event)); }
  void set_state(Node& node, State state);
  bool elastic() const { return options_.min_nodes < options_.max_nodes; }
  int eligible() const { return static_cast<int>(nodes_.size()) - duplicates_; }
  bool is_full() const { return eligible() >= options_.max_nodes; }
  std::vector<int> missing_ranks() const;
  TimePoint next_scan() const { return last_scan_ + options_.heartbeat_timeout / 5; }

  const RendezvousOptions options_;
  Phase phase_ = Phase::kGathering;
  int generation_, restarts_;
  Nodes nodes_;
  int64_t arrivals_ = 0;
  int duplicates_ = 0, running_ = 0, busy_ = 0;  // busy: kRunning or kDone
  int departed_ = 0;
  bool began_ = false;  // this root has started a generation
  int expected_ = 0;    // number of nodes that remained after the last root died or left
  Outcome failure_;     // the failure that stops the generation; status 0: none
  bool membership_changed_ = false;
  Outcome outcome_;
  std::string next_root_;  // its address, if this root knows it
  TimePoint gather_deadline_, next_progress_, repeat_progress_, last_scan_, stop_deadline_;
  std::string last_progress_;
  TimePoint last_call_{INT64_MAX};
  TimePoint join_deadline_{INT64_MAX};  // the end of the generation that nodes have joined
  TimePoint began_at_, restart_at_;     // the start of this generation, and the earliest start of the next one
  int quick_failures_ = 0;              // generations in a row that failed soon after their start
  std::vector<JobEvent> events_;
  std::vector<std::pair<std::string, Assignment>> assignments_;
};

}  // namespace muster
