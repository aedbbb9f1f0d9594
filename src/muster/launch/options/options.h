#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/clock.h"
#include "muster/base/error.h"

namespace muster {

inline constexpr int kMaxWorkers = 1 << 16;  ///< of a node
inline constexpr int kMaxNodes = 1 << 20;
/// For the goodbyes of nodes that stop, on top of the shutdown timeout.
inline constexpr Duration kLeaveTime = std::chrono::seconds(10);

/// A copy of the environment: what a parse depends on is passed in, so that it can be tested.
using Environment = std::map<std::string, std::string>;
Environment current_environment();

/// What the machine has, for --nproc-per-node auto, cpu and gpu.
struct Machine {
  int cpus = 1;  ///< that this process may run on
  int gpus = 0;
  int xpus = 0;  ///< Intel's
};
Machine this_machine();
/// The CPUs that this process may run on, by the kernel's numbers and in order.
std::vector<int> allowed_cpus();

/// One or both of a worker's output streams, as a set of bits (the digits of torchrun's --redirects and --tee).
enum Streams : uint8_t { kNoStream = 0, kStdout = 1, kStderr = 2, kBothStreams = 3 };

/// Which streams of which workers. "3" is both of all; "0:1,2:3" names workers, and the others have none.
struct StreamChoice {
  Streams all = kNoStream;
  std::map<int, Streams> by_local_rank;  ///< not empty: it alone counts

  Streams of(int local_rank) const;
};

/// How workers are started: forked from a process that has torch imported, or each a new interpreter.
enum class StartMethod { kZygote, kSpawn };

enum class NumaBinding { kNone, kNode, kSocket, kExclusive, kCoreComplex };

/// A host of --hosts or --hostfile.
struct HostSlot {
  std::string host;
  int nproc = 0;  ///< its workers; 0: as --nproc-per-node says
};

/// What `muster run` was asked to do. The comments name the option where its name is another.
struct RunOptions {
  enum class Target { kScript, kModule, kProgram, kRunPath };

  bool help = false;  ///< nothing else counts then
  bool dry_run = false;

  // Nodes and workers.
  int nnodes_min = 1, nnodes_max = 1;  ///< --nnodes; equal unless it is a range
  int nproc = 1;                       ///< workers on this node
  std::optional<int> node_rank;        ///< none: by order of arrival
  std::string role = "default";

  std::vector<std::string> notices;  ///< sentences for the user: what was given and has no effect
  std::string cluster;               ///< which options a cluster's environment gave, for the user; empty: none

  // Where they meet.
  std::string rdzv_backend = "static";  ///< or c10d or parallel: all the job's own store; redis, etcd, file: rdzv_url
  std::string rdzv_url;      ///< "redis://host:port", "etcd://host:port" or "file:///path"; empty: the job's own store
  std::string master_addr;   ///< also --rdzv-endpoint; empty on a single node, and with Redis or etcd
  uint16_t master_port = 0;  ///< 0: any free one (single node only)
  std::string local_addr;    ///< interface or address of this node to listen on; empty: master_addr's
  std::optional<bool> is_host;   ///< --rdzv-conf is_host: whether this node holds the store; none: found out
  std::string run_id;            ///< --rdzv-id
  Bytes secret;                  ///< the job's, from MUSTER_SECRET or --secret-file; empty: none given
  bool tiered = false;           ///< --enable-tiered-parallel-tcpstore
  int store_fanout = 0;          ///< proxies below a middle one; 0: no middle tier
  Duration timeout{};            ///< for nnodes_min nodes to arrive; also --rdzv-conf join_timeout
  Duration last_call_timeout{};  ///< --rdzv-conf: after the nnodes_min-th node, for more to come
  Duration heartbeat_timeout{};  ///< --rdzv-conf: a node that is silent for longer is lost
  Duration close_timeout{};      ///< --rdzv-conf: after the job's end, for the other nodes to hear of it

  // The workers' lives.
  int max_restarts = 0;                     ///< of the job
  Duration shutdown_timeout{};              ///< between SIGTERM and SIGKILL
  std::vector<int> signals;                 ///< --signals-to-handle: those that end the job
  std::optional<StartMethod> start_method;  ///< none: the zygote for what Python runs
  std::vector<std::string> preload;         ///< modules that the zygote imports besides torch
  bool warm = true;                         ///< false (--no-warm): not from a zygote that `muster warm` keeps
  NumaBinding numa_binding = NumaBinding::kNone;
  bool virtual_local_rank = false;

  // What they write.
  std::string log_dir;                                      ///< base folder; empty: none was named
  StreamChoice redirects, tee;                              ///< to files alone, and to files and the console
  std::set<int> local_ranks_filter;                         ///< whose output the console shows; empty: everybody's
  std::vector<std::string> stdout_filters, stderr_filters;  ///< --duplicate-stdout-filters, --duplicate-stderr-filters
  std::string event_log;                                    ///< --event-log-handler: empty, "console" or a file

  // Nodes that are started from here by ssh.
  std::vector<HostSlot> hosts;    ///< --hosts or --hostfile; empty: this node alone is started from here
  std::string ssh;                ///< the command, with its options
  bool until_stdin_ends = false;  ///< such a node: its end of the connection is the job's end there

  Target target = Target::kScript;
  std::string program;  ///< script, module or program
  std::vector<std::string> arguments;

  /// The options as they were given, each "--name=value", those of PET_* among them.
  std::vector<std::string> canonical_args;

  bool elastic() const { return nnodes_min != nnodes_max; }
};

/// Reads what follows `muster run` (see read_option_words). kInvalidArgument names the option and what it takes.
Result<RunOptions> parse_run_options(const std::vector<std::string>& arguments, const Environment& environment,
                                     const Machine& machine);
std::string run_help();

}  // namespace muster
