#pragma once

#include <optional>
#include <string>

#include "muster/launch/workers/worker_environment.h"
#include "muster/store/store.h"

namespace muster {

/// A node as the root knows it.
struct NodeInfo {
  std::string id;  ///< unique for each agent
  std::string host;
  std::string process_domain;  ///< the domain in which `pid` is unique; see io/host_identity.h
  int pid = 0;
  int nproc = 1;
  int min_nodes = 1, max_nodes = 1;
  std::string role;
  std::optional<int> wanted;  ///< --node-rank
  int last_rank = -1;         ///< its rank in its last generation; -1: none
  int last_nnodes = 0;        ///< the number of nodes of that generation
  int max_restarts = 0;       ///< the job's
  std::string address{};      ///< its IP address for the other nodes
};

/// How the job ended; the same on all nodes.
struct Outcome {
  int status = 0;        ///< exit status of `muster run`
  std::string report{};  ///< empty if the job succeeded
};

/// An event that an agent sends to the root.
struct NodeEvent {
  enum class Kind {
    kJoin,     ///< `node` asks for a place in the next generation
    kAlive,    ///< a heartbeat
    kDone,     ///< all workers of `generation` on this node have succeeded
    kFailed,   ///< a worker of `generation` has failed with `outcome`
    kStopped,  ///< no process of `generation` is left on this node
    kEnd,      ///< end the job with `outcome` without a restart: the user stopped it, or workers cannot start
    kLeave,    ///< this node leaves; `outcome` is the job's if it cannot continue without this node
    kBye,      ///< this node knows the outcome and needs the store no longer
    kMove,     ///< the root stops being the root; `root` is the next one's address, or empty if there is none yet
    kKilled,   ///< the agent was killed; sent by its monitor
  };
  Kind kind = Kind::kAlive;
  std::string id{};  ///< the node's id
  int generation = 0;
  Outcome outcome{};
  NodeInfo node{};
  std::string root{};
};

/// An event that the root sends to all agents. All agents get the events in one order.
struct JobEvent {
  enum class Kind {
    kStart,     ///< `generation` starts; the assignments are in the store
    kStop,      ///< `generation` ends; `text` is the reason
    kOutcome,   ///< the job has ended
    kRefused,   ///< node `id` cannot join; `text` is the reason
    kEvicted,   ///< the root got no heartbeats of node `id` and removed it; the node may join again
    kMoved,     ///< this root leaves: the next root is found through its store. `text`: its address, if it is known
    kProgress,  ///< `text` for the users of waiting nodes
  };
  Kind kind = Kind::kProgress;
  int generation = 0;
  std::string id{};
  std::string text{};
  Outcome outcome{};
};

/// A node's place in one generation.
struct Assignment {
  Placement placement;
  int generation = 0;
  int restarts = 0;          ///< how often the job was restarted after a failure
  std::string node0_addr{};  ///< NodeInfo::address of the node with rank 0
};

/// Messages are JSON. Any process with the job's secret can write them, so parsing checks them. kProtocol: the error
/// names the wrong field.
Bytes encode(const NodeEvent& event);
Bytes encode(const JobEvent& event);
Bytes encode(const Assignment& assignment);
Result<NodeEvent> parse_node_event(ByteView bytes);
Result<JobEvent> parse_job_event(ByteView bytes);
Result<Assignment> parse_assignment(ByteView bytes);

/// The job's keys in its store, all under "muster/run/<run id>/":
///
///   inbox                  queue of NodeEvents to the root
///   news-count, news/<n>   the events, numbered from 1
///   place/<g>/<node id>    the Assignment of a node in generation g
///   nodes                  JSON for `muster status`: the root's view of the nodes
///   workers/<g>/<node>     JSON [pid, ...] by local rank
///   exit/<g>/<rank>        JSON {host, pid, code, signal} of a worker that has ended
///   tier-count, tier/<n>   with --store-fanout: places in the tree of proxies, and the URLs where they listen
///   root                   in an external store: the URL of the root's store, as a claim. In the store of a root that
///                          leaves: the URL of the next root's store
///   ledger                 JSON {generation, restarts}; in the external store, if there is one
///
/// The keys of workers are under generation_prefix().
class JobKeys {
 public:
  explicit JobKeys(const std::string& run_id) : prefix_("muster/run/" + run_id + "/") {}
  Key inbox() const { return prefix_ + "inbox"; }
  Key event_count() const { return prefix_ + "news-count"; }
  Key event(int64_t number) const { return prefix_ + "news/" + std::to_string(number); }
  Key assignment(int generation, const std::string& id) const {
    return prefix_ + "place/" + std::to_string(generation) + "/" + id;
  }
  Key nodes() const { return prefix_ + "nodes"; }
  Key root() const { return prefix_ + "root"; }
  Key tier_count() const { return prefix_ + "tier-count"; }
  Key tier(int64_t index) const { return prefix_ + "tier/" + std::to_string(index); }
  Key persisted_state() const { return prefix_ + "ledger"; }
  /// The prefix of all keys of a generation. The number of the node or rank follows it.
  Key workers(int generation) const { return prefix_ + "workers/" + std::to_string(generation) + "/"; }
  Key exits(int generation) const { return prefix_ + "exit/" + std::to_string(generation) + "/"; }

 private:
  std::string prefix_;
};

/// "generation/3/": the prefix of all keys of the workers of generation 3. It separates them from other generations.
std::string generation_prefix(int generation);

}  // namespace muster
