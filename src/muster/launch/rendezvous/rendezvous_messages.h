#pragma once

#include <optional>
#include <string>

#include "muster/launch/workers/worker_environment.h"
#include "muster/store/store.h"

namespace muster {

/// A node as its agent presents it to the others.
struct NodeInfo {
  std::string id;  ///< of this agent's process: nobody else's, ever
  std::string host;
  std::string process_domain;  ///< in which `pid` names the agent: see io/host_identity.h
  int pid = 0;
  int nproc = 1;
  int min_nodes = 1, max_nodes = 1;
  std::string role;
  std::optional<int> wanted;  ///< --node-rank
  int last_rank = -1;         ///< the node's rank in the last generation that it was in; -1: in none
  int last_nnodes = 0;        ///< how many nodes that one had
  int max_restarts = 0;       ///< of the job
};

/// How the job ended, for all of its nodes.
struct Outcome {
  int status = 0;        ///< exit status of `muster run`
  std::string report{};  ///< empty when it ended well
};

/// What an agent tells the root.
struct NodeEvent {
  enum class Kind {
    kJoin,     ///< `node` wants to be in the next generation
    kAlive,    ///< nothing but a sign of life
    kDone,     ///< all workers of `generation` here have ended well
    kFailed,   ///< a worker of `generation` has failed: `outcome`
    kStopped,  ///< no process of `generation` is left here
    kEnd,      ///< the job is to end with `outcome`, whatever restarts are left: the user said so, or no start can work
    kLeave,    ///< this node goes, and an elastic job may go on without it; `outcome` is the job's if it cannot
    kBye,      ///< this node has heard the outcome and needs the store no longer
    kKilled,   ///< says the guard of this node's agent
  };
  Kind kind = Kind::kAlive;
  std::string id{};  ///< the node's
  int generation = 0;
  Outcome outcome{};
  NodeInfo node{};
};

/// What the root tells all agents, in one order.
struct JobEvent {
  enum class Kind {
    kStart,     ///< `generation` begins; a node that has a place in it finds that in the store
    kStop,      ///< `generation` ends: `text` says why
    kOutcome,   ///< the job has ended
    kRefused,   ///< node `id` cannot be in the job: `text`
    kEvicted,   ///< the root has not heard from node `id` for long and has given it up: it may join anew
    kProgress,  ///< for who waits: `text`
  };
  Kind kind = Kind::kProgress;
  int generation = 0;
  std::string id{};
  std::string text{};
  Outcome outcome{};
};

/// A node's place in one generation.
struct Assignment {
  Placement place;
  int generation = 0;
  int restarts = 0;  ///< how often the job was restarted after a failure
};

/// JSON. What is parsed may be anybody's who has the job's secret: kProtocol says what it is not.
Bytes encode(const NodeEvent& call);
Bytes encode(const JobEvent& news);
Bytes encode(const Assignment& assignment);
Result<NodeEvent> parse_call(ByteView bytes);
Result<JobEvent> parse_news(ByteView bytes);
Result<Assignment> parse_assignment(ByteView bytes);

/// The job's keys in its store, all under "muster/run/<run id>/":
///
///   inbox                  queue of Calls to the root
///   news-count, news/<n>   the events, numbered from 1
///   place/<g>/<node id>    the Assignment of a node in generation g
///   nodes                  JSON for people: the nodes as the root sees them
///   workers/<g>/<node>     JSON [pid, ...] by local rank
///   exit/<g>/<rank>        JSON {host, pid, code, signal} of a worker that has ended
///   tier-count, tier/<n>   with --store-fanout: places in the tree of proxies, and the URLs where they listen
///   root                   URL of the root's store: in a store that outlives it, where there is one; a claim there
///   ledger                 JSON {generation, restarts}: in a store that outlives the root, where there is one
///
/// What workers write is under generation_prefix().
class JobKeys {
 public:
  explicit JobKeys(const std::string& run_id) : prefix_("muster/run/" + run_id + "/") {}
  Key inbox() const { return prefix_ + "inbox"; }
  Key news_count() const { return prefix_ + "news-count"; }
  Key news(int64_t number) const { return prefix_ + "news/" + std::to_string(number); }
  Key place(int generation, const std::string& id) const {
    return prefix_ + "place/" + std::to_string(generation) + "/" + id;
  }
  Key nodes() const { return prefix_ + "nodes"; }
  Key root() const { return prefix_ + "root"; }
  Key tier_count() const { return prefix_ + "tier-count"; }
  Key tier(int64_t place) const { return prefix_ + "tier/" + std::to_string(place); }
  Key persisted_state() const { return prefix_ + "ledger"; }
  /// All of a generation's; that of one node or rank has its number behind.
  Key workers(int generation) const { return prefix_ + "workers/" + std::to_string(generation) + "/"; }
  Key exits(int generation) const { return prefix_ + "exit/" + std::to_string(generation) + "/"; }

 private:
  std::string prefix_;
};

/// "generation/3/": before every key of the workers of generation 3, so that those of another never meet it.
std::string generation_prefix(int generation);

}  // namespace muster
