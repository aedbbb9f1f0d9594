#pragma once

#include <optional>
#include <string>
#include <vector>

#include "muster/launch/environment.h"
#include "muster/launch/failure.h"
#include "muster/store/store.h"

namespace muster {

/// A node as it presents itself to the others.
struct NodeInfo {
  std::string host;
  int pid = 0;  ///< the agent's
  int nproc = 1;
  int nnodes = 1;
};

/// How the job ended, for all of its nodes.
struct Outcome {
  int status = 0;      ///< exit status of `muster run`
  std::string report;  ///< empty when it ended well
  int node_rank = 0;   ///< which node says so
};

/// What the agents of a job tell each other through its store, under "muster/run/<run id>/":
///
///   job            JSON {host, nnodes}: the first node's
///   node/<rank>    JSON {host, pid, nproc, nnodes}
///   arrivals       counter, for nodes without a rank of their own
///   exit/<rank>    JSON {host, pid, code, signal}: of a worker that has ended
///   done           counter of nodes whose workers all ended well
///   outcome        JSON {status, report, node}: the first to be written holds
///   left, all-left counter of nodes that know the outcome, and its end
///
/// Borrows the store. As thread-safe as the store is.
class JobBoard {
 public:
  JobBoard(Store& store, const std::string& run_id) : store_(store), prefix_("muster/run/" + run_id + "/") {}

  /// Takes a place among the nodes, waits for the others and returns this one's. `wanted`: none for a node that takes
  /// the next free one. kAlreadyExists names the host that has the place, kMismatch another --nnodes, kTimeout the
  /// nodes that did not come.
  Result<Placement> join(const NodeInfo& self, std::optional<int> wanted, Duration timeout);

  Result<> publish_exit(const WorkerExit& exit, const Deadline& deadline);
  /// This node's workers have all ended well. The last node's word makes it the outcome.
  Result<> node_done(int nnodes, const Deadline& deadline);
  /// Proposes an outcome; the one that holds is returned, which may be another's.
  Result<Outcome> conclude(const Outcome& proposed, const Deadline& deadline);
  Result<Outcome> await_outcome(const Deadline& deadline);
  /// This node knows the outcome and needs the store no longer.
  Result<> leave(int nnodes, const Deadline& deadline);
  Result<> await_all_left(const Deadline& deadline);

 private:
  Key key(const std::string& name) const { return prefix_ + name; }
  Result<> agree_on_nnodes(const NodeInfo& self, const Deadline& deadline);
  Result<int> take_place(const NodeInfo& self, std::optional<int> wanted, const Deadline& deadline);
  Result<std::vector<NodeInfo>> await_nodes(int nnodes, Duration timeout);

  Store& store_;
  std::string prefix_;
};

}  // namespace muster
