#include "muster/launch/options/option_table.h"

#include <string_view>

namespace muster {
namespace {

using Raw = RawOptions;

constexpr const char* kNodes = "Nodes and workers";
constexpr const char* kRendezvous = "Rendezvous";
constexpr const char* kStarting = "Starting workers";
constexpr const char* kFailing = "Failures and shutdown";
constexpr const char* kOutput = "Output";
constexpr const char* kOther = "Other";
constexpr const char* kHidden = "";

constexpr OptionRow kTable[] = {
    {kNodes, "--nnodes", "N|MIN:MAX", "number of nodes; a range lets the job lose and gain nodes", &Raw::nnodes},
    {kNodes, "--nproc-per-node", "N|auto|cpu|gpu|xpu|npu",
     "workers on this node; auto: one per GPU or NPU, or one per CPU without them", &Raw::nproc},
    {kNodes, "--node-rank", "N", "rank of this node, from 0; the default is the order of arrival", &Raw::node_rank},
    {kNodes, "--role", "NAME", "the workers' role (ROLE_NAME)", &Raw::role},
    {kNodes, "--standalone", nullptr, "run a job of one node", nullptr, &Raw::standalone},
    {kNodes, "--hosts", "A,B[:N],...", "start the job on these hosts by ssh; N: number of workers there", &Raw::hosts},
    {kNodes, "--hostfile", "FILE", "read the hosts from a file, one per line: NAME [slots=N]", &Raw::hostfile},
    {kNodes, "--ssh", "COMMAND", "the command that connects to a host (MUSTER_SSH)", &Raw::ssh},

    {kRendezvous, "--master-addr", "HOST", "host of node 0, where the job's store listens", &Raw::master_addr},
    {kRendezvous, "--master-port", "PORT", "port of the store (29500 with several nodes, else any free port)",
     &Raw::master_port},
    {kRendezvous, "--local-addr,--interface", "ADDRESS|INTERFACE", "address or network interface of this node to use",
     &Raw::local_addr},
    {kRendezvous, "--rdzv-backend", "static|c10d|parallel|redis|etcd|file",
     "static, c10d, parallel: the job's own store at node 0; redis, etcd, file: that server or file",
     &Raw::rdzv_backend},
    {kRendezvous, "--rdzv-endpoint", "HOST[:PORT]|URL",
     "address of node 0, or redis[s]://HOST:PORT, etcd[s]://HOST:PORT, file:///PATH", &Raw::rdzv_endpoint},
    {kRendezvous, "--rdzv-id", "NAME", "the job's name, the same on all nodes", &Raw::rdzv_id},
    {kRendezvous, "--rdzv-conf", "KEY=VALUE,...",
     "join_timeout, last_call_timeout, heartbeat_timeout (seconds), is_host, ...", &Raw::rdzv_conf},
    {kRendezvous, "--timeout", "SECONDS", "how long to wait until all nodes have joined (300)", &Raw::timeout},
    {kRendezvous, "--secret-file", "FILE",
     "holds the job's secret in hex, the same on all nodes (MUSTER_SECRET); -: standard input", &Raw::secret_file},
    {kRendezvous, "--enable-tiered-parallel-tcpstore", nullptr,
     "connect workers to the store through a proxy on their node", nullptr, &Raw::tiered},
    {kRendezvous, "--store-fanout", "N|auto",
     "proxies per middle proxy; 0: no middle proxies; auto: sqrt(nnodes) above 100 nodes, else 0", &Raw::store_fanout},

    {kStarting, "-m,--module", nullptr, "run a Python module, as python -m does", nullptr, &Raw::module},
    {kStarting, "-c,--code", nullptr, "run the next argument as Python code, as python -c does", nullptr, &Raw::code},
    {kStarting, "--no-python", nullptr, "run a program that is not a Python script", nullptr, &Raw::no_python},
    {kStarting, "--run-path", nullptr, "run the script with runpy.run_path", nullptr, &Raw::run_path},
    {kStarting, "--start-method", "zygote|spawn",
     "zygote: fork workers from a process that has imported torch; spawn: start each by itself", &Raw::start_method},
    {kStarting, "--preload", "MODULE,...", "modules that the zygote imports besides torch", &Raw::preload},
    {kStarting, "--no-warm", nullptr, "do not use the zygote that `muster warm` keeps", nullptr, &Raw::no_warm},
    {kStarting, "--numa-binding", "node|socket|exclusive|core-complex", "bind each worker to CPUs near its device",
     &Raw::numa_binding},
    {kStarting, "--virtual-local-rank", nullptr, "set LOCAL_RANK=0 for all workers and show each only its own device",
     nullptr, &Raw::virtual_local_rank},
    {kStarting, "--reachable-master-addr", nullptr,
     "set MASTER_ADDR to node 0's address, for scripts that listen there; torch's clients in Python still work",
     nullptr, &Raw::reachable_master_addr},
    {kStarting, "--replace", "gloo", "groups that ask for this backend get muster for CPU tensors (MUSTER_REPLACE)",
     &Raw::replace},

    {kFailing, "--max-restarts", "N", "how often all workers are restarted after failures, counted for the whole job",
     &Raw::max_restarts},
    {kFailing, "--restart-delay", "SECONDS",
     "longest pause before a restart; the pause doubles with each quick failure in a row, from 0, 1 and 2 seconds",
     &Raw::restart_delay},
    {kFailing, "--monitor-interval", "SECONDS", "for torchrun; has no effect: the end of a worker is noticed at once",
     &Raw::monitor_interval},
    {kFailing, "--shutdown-timeout", "SECONDS", "time between SIGTERM and SIGKILL when workers are stopped (30)",
     &Raw::shutdown_timeout},
    {kFailing, "--signals-to-handle", "SIGNAL,...",
     "signals that end the job, besides SIGTERM, SIGINT and SIGHUP; see below for SIGUSR1 and SIGUSR2", &Raw::signals},

    {kOutput, "--log-dir", "DIR", "keep the workers' output in DIR/ID_XXXXXX/attempt_N/LOCAL_RANK/", &Raw::log_dir},
    {kOutput, "-r,--redirects", "STREAMS",
     "write only to files: 0 none, 1 stdout, 2 stderr, 3 both; by local rank: 0:1,1:2", &Raw::redirects},
    {kOutput, "-t,--tee", "STREAMS", "write to files and the console (3 with --log-dir and no -r)", &Raw::tee},
    {kOutput, "--log-line-prefix-template", "TEXT",
     "before each line: with ${role_name}, ${rank}, ${local_rank}, ${hostname}", &Raw::prefix_template},
    {kOutput, "--local-ranks-filter", "RANK,...", "show only the output of these local ranks",
     &Raw::local_ranks_filter},
    {kOutput, "--duplicate-stdout-filters", "WORD,...", "copy lines with one of these words to filtered_stdout.log",
     &Raw::stdout_filters},
    {kOutput, "--duplicate-stderr-filters", "WORD,...", "copy lines with one of these words to filtered_stderr.log",
     &Raw::stderr_filters},
    {kOutput, "--logs-specs", "default", "for torchrun; only default is supported", &Raw::logs_specs},
    {kOutput, "--event-log-handler", "null|console|FILE", "write events as JSON, one object per line", &Raw::event_log},

    {kOther, "--dry-run", nullptr, "print what would run, and do not run it", nullptr, &Raw::dry_run},
    {kOther, "-h,--help", nullptr, "show this help", nullptr, &Raw::help},
    {kHidden, "--until-stdin-ends", nullptr, "end the job when standard input ends", nullptr, &Raw::until_stdin_ends},
};

}  // namespace

std::string OptionRow::name() const {
  std::string_view all = names;
  all.remove_prefix(all.find("--"));
  return std::string(all.substr(0, all.find(',')));
}

std::span<const OptionRow> option_table() { return kTable; }

}  // namespace muster
