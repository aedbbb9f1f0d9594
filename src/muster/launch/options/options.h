#pragma once

#include <algorithm>
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

inline constexpr int kMaxWorkers = 1 << 16;  ///< per node
inline constexpr int kMaxNodes = 1 << 20;
/// How long nodes that stop may take to tell the root, in addition to the shutdown timeout.
inline constexpr Duration kLeaveTime = std::chrono::seconds(10);

/// A copy of the environment: the parser gets all its inputs as arguments, so that tests can set them.
using Environment = std::map<std::string, std::string>;
Environment current_environment();
/// Empty if the variable is not set.
std::string value_of(const Environment& environment, const std::string& name);

/// The devices of a machine, for --nproc-per-node.
struct Machine {
  int cpus = 1;  ///< CPUs that this process may use: see usable_cpus()
  int gpus = 0;
  int xpus = 0;  ///< Intel GPUs
  int npus = 0;  ///< Ascend NPUs
};
Machine this_machine();
/// The number of CPUs that this process can keep busy: those that it may run on, or fewer if a cgroup limits its CPU
/// time. At least 1. `root`: the root directory.
int usable_cpus(int allowed, const std::string& root = "/");
/// The number of NVIDIA or AMD GPUs with device files in this machine or container. `root`: the root directory.
int count_gpus(const std::string& root = "/");
/// The number of Ascend NPUs with device files in this machine or container, or fewer if ASCEND_RT_VISIBLE_DEVICES
/// lists fewer. `root`: the root directory.
int count_npus(const Environment& environment, const std::string& root = "/");
/// The devices that programs see with CUDA_VISIBLE_DEVICES (and AMD's variables) of this environment, in the order in
/// which the programs number them. `devices` is in the machine's order. As in CUDA, the first invalid entry ends the
/// list. -1 stands for a device that is not named by its number (GPU-..., MIG-...).
std::vector<int> visible_devices(std::vector<int> devices, const Environment& environment);
/// The kernel's numbers of the CPUs that this process may run on, in ascending order.
std::vector<int> allowed_cpus();

/// One or both of a worker's output streams, as a set of bits (the digits of torchrun's --redirects and --tee).
enum Streams : uint8_t { kNoStream = 0, kStdout = 1, kStderr = 2, kBothStreams = 3 };

/// The output streams to use, for each worker. "3" is both streams of all workers. "0:1,2:3" lists workers; others have
/// none.
struct StreamChoice {
  Streams all = kNoStream;
  std::map<int, Streams> by_local_rank;  ///< if not empty, `all` has no effect

  Streams of(int local_rank) const;
};

/// Workers are forked from a process that has imported torch, or each starts a new interpreter.
enum class StartMethod { kZygote, kSpawn };

enum class NumaBinding { kNone, kNode, kSocket, kExclusive, kCoreComplex };

/// A host of --hosts or --hostfile.
struct HostSlot {
  std::string host;
  int nproc = 0;  ///< number of workers; 0: --nproc-per-node
};

/// The parsed options of `muster run`. A comment names the option if the field has another name.
struct RunOptions {
  enum class Target { kScript, kModule, kCode, kProgram, kRunPath };

  bool help = false;  ///< the other fields are not set then
  bool dry_run = false;

  // Nodes and workers.
  int nnodes_min = 1, nnodes_max = 1;  ///< --nnodes; equal unless it is a range
  int nproc = 1;                       ///< workers on this node
  std::optional<int> node_rank;        ///< none: nodes are numbered by their order of arrival
  std::string role = "default";

  std::vector<std::string> notices;  ///< for the user: options that have no effect
  std::string cluster;               ///< for the user: options from a cluster's environment; empty: none

  // Rendezvous.
  std::string rdzv_backend = "static";  ///< static, c10d, parallel: the job's own store; redis, etcd, file: rdzv_url
  std::string rdzv_url;      ///< "redis://host:port", "etcd://host:port" or "file:///path"; empty: the job's own store
  std::string master_addr;   ///< also --rdzv-endpoint; empty on a single node, and with Redis or etcd
  uint16_t master_port = 0;  ///< 0: any free port (single node only)
  std::string local_addr;    ///< interface or address of this node to listen on; empty: master_addr's
  std::optional<bool> is_host;   ///< --rdzv-conf is_host: this node is the root; none: decided by the address
  std::string run_id;            ///< --rdzv-id
  Bytes secret;                  ///< the job's, from MUSTER_SECRET or --secret-file; empty: none given
  bool tiered = false;           ///< --enable-tiered-parallel-tcpstore
  int store_fanout = 0;          ///< proxies per middle proxy; 0: no middle proxies
  Duration timeout{};            ///< until nnodes_min nodes have joined; also --rdzv-conf join_timeout
  Duration last_call_timeout{};  ///< --rdzv-conf: time for more than nnodes_min nodes to join
  Duration heartbeat_timeout{};  ///< --rdzv-conf: a node without heartbeats for longer is lost
  Duration close_timeout{};      ///< --rdzv-conf: time after the job's end until all nodes know of it

  // Workers.
  int max_restarts = 0;                     ///< restarts of the whole job
  Duration restart_delay{};                 ///< the longest pause before a restart
  Duration shutdown_timeout{};              ///< between SIGTERM and SIGKILL
  std::vector<int> signals;                 ///< --signals-to-handle: signals that end the job
  std::optional<StartMethod> start_method;  ///< none: the zygote for Python scripts
  std::vector<std::string> preload;         ///< modules that the zygote imports besides torch
  bool warm = true;                         ///< --no-warm: false, no zygote of `muster warm` is used
  NumaBinding numa_binding = NumaBinding::kNone;
  bool virtual_local_rank = false;
  bool replace_gloo = false;           ///< --replace gloo
  bool reachable_master_addr = false;  ///< MASTER_ADDR is node 0's address; else it is the loopback address

  // Output.
  std::string log_dir;                                      ///< base directory; empty: none
  StreamChoice redirects, tee;                              ///< streams that go only to files; to files and the console
  std::set<int> local_ranks_filter;                         ///< workers that the console shows; empty: all
  std::vector<std::string> stdout_filters, stderr_filters;  ///< --duplicate-stdout-filters, --duplicate-stderr-filters
  std::string prefix_template;                              ///< of lines of output; empty: "[rank 3] "
  std::string event_log;                                    ///< --event-log-handler: empty, "console" or a file

  // Nodes that are started by ssh.
  std::vector<HostSlot> hosts;    ///< --hosts or --hostfile; empty: only this node is started
  std::string ssh;                ///< the ssh command with its options
  bool until_stdin_ends = false;  ///< for a node that ssh started: the job ends there when the connection ends

  Target target = Target::kScript;
  std::string program;      ///< script, module, code or program
  bool from_stdin = false;  ///< the script or program is "-"
  std::vector<std::string> arguments;

  /// The options from the command line and from PET_*, each as "--name=value".
  std::vector<std::string> canonical_args;

  bool elastic() const { return nnodes_min != nnodes_max; }
  bool ends_job(int signal) const { return std::find(signals.begin(), signals.end(), signal) != signals.end(); }
};

/// Parses the arguments of `muster run` (see parse_args()). kInvalidArgument: the message names the option and its
/// values.
Result<RunOptions> parse_run_options(const std::vector<std::string>& arguments, const Environment& environment,
                                     const Machine& machine);
std::string run_help();

}  // namespace muster
