#include "muster/launch/options/option_table.h"

#include <string_view>

namespace muster {
namespace {

using Raw = RawOptions;

constexpr const char* kNodes = "Nodes and workers";
constexpr const char* kMeeting = "Where they meet";
constexpr const char* kStarting = "What is started, and how";
constexpr const char* kFailing = "Failures and the end";
constexpr const char* kOutput = "Output";
constexpr const char* kOther = "Other";
constexpr const char* kHidden = "";

constexpr OptionRow kTable[] = {
    {kNodes, "--nnodes", "N|MIN:MAX", "number of nodes (hosts); a range may lose and gain nodes", &Raw::nnodes},
    {kNodes, "--nproc-per-node", "N|auto|cpu|gpu|xpu",
     "workers on this node; auto: one per GPU, or per CPU where there is none", &Raw::nproc},
    {kNodes, "--node-rank", "N", "this node's number, from 0; by order of arrival when not given", &Raw::node_rank},
    {kNodes, "--role", "NAME", "the workers' role (ROLE_NAME)", &Raw::role},
    {kNodes, "--standalone", nullptr, "a job on this node alone", nullptr, &Raw::standalone},
    {kNodes, "--hosts", "A,B[:N],...", "start the job on these hosts by ssh; N: workers there", &Raw::hosts},
    {kNodes, "--hostfile", "FILE", "the same, one host a line: NAME [slots=N]", &Raw::hostfile},
    {kNodes, "--ssh", "COMMAND", "what reaches a host (MUSTER_SSH)", &Raw::ssh},

    {kMeeting, "--master-addr", "HOST", "host of node 0, where the job's store listens", &Raw::master_addr},
    {kMeeting, "--master-port", "PORT", "its port (29500 with several nodes; one node: any free one)",
     &Raw::master_port},
    {kMeeting, "--local-addr,--interface", "ADDRESS|INTERFACE", "this node's address or interface to use",
     &Raw::local_addr},
    {kMeeting, "--rdzv-backend", "static|c10d|parallel|redis|etcd|file",
     "the first three: the job's own store at node 0; redis, etcd, file: that server or file", &Raw::rdzv_backend},
    {kMeeting, "--rdzv-endpoint", "HOST[:PORT]|URL", "node 0, or redis://HOST:PORT, etcd://HOST:PORT, file:///PATH",
     &Raw::rdzv_endpoint},
    {kMeeting, "--rdzv-id", "NAME", "the job's name, the same on all nodes", &Raw::rdzv_id},
    {kMeeting, "--rdzv-conf", "KEY=VALUE,...",
     "join_timeout, last_call_timeout, heartbeat_timeout (seconds), is_host, ...", &Raw::rdzv_conf},
    {kMeeting, "--timeout", "SECONDS", "for all nodes to arrive (300)", &Raw::timeout},
    {kMeeting, "--secret-file", "FILE", "the job's secret in hex, the same on all nodes (MUSTER_SECRET); -: from stdin",
     &Raw::secret_file},
    {kMeeting, "--enable-tiered-parallel-tcpstore", nullptr, "workers reach the store through their node's proxy",
     nullptr, &Raw::tiered},
    {kMeeting, "--store-fanout", "N|auto",
     "at most N proxies to a middle one; 0: no middle tier; auto: the root of over 100 nodes", &Raw::store_fanout},

    {kStarting, "-m,--module", nullptr, "run a Python module: python -m", nullptr, &Raw::module},
    {kStarting, "--no-python", nullptr, "run the program itself, not under Python", nullptr, &Raw::no_python},
    {kStarting, "--run-path", nullptr, "run the script with runpy.run_path", nullptr, &Raw::run_path},
    {kStarting, "--start-method", "zygote|spawn",
     "fork workers from a process that has torch imported (what Python runs does), or start an interpreter each",
     &Raw::start_method},
    {kStarting, "--preload", "MODULE,...", "what the zygote imports besides torch", &Raw::preload},
    {kStarting, "--no-warm", nullptr, "not from the zygote that `muster warm` keeps", nullptr, &Raw::no_warm},
    {kStarting, "--numa-binding", "node|socket|exclusive|core-complex", "bind each worker to CPUs near its device",
     &Raw::numa_binding},
    {kStarting, "--virtual-local-rank", nullptr, "LOCAL_RANK 0 for all, each seeing its own device only", nullptr,
     &Raw::virtual_local_rank},

    {kFailing, "--max-restarts", "N", "restarts of all workers after failures, counted for the whole job",
     &Raw::max_restarts},
    {kFailing, "--monitor-interval", "SECONDS", "torchrun's; without effect: the end of a worker is noticed at once",
     &Raw::monitor_interval},
    {kFailing, "--shutdown-timeout", "SECONDS", "between SIGTERM and SIGKILL when the job is stopped (5)",
     &Raw::shutdown_timeout},
    {kFailing, "--signals-to-handle", "SIGNAL,...", "those that end the job, besides SIGTERM, SIGINT and SIGHUP",
     &Raw::signals},

    {kOutput, "--log-dir", "FOLDER", "keep the workers' output in FOLDER/ID_XXXXXX/attempt_N/LOCAL_RANK/",
     &Raw::log_dir},
    {kOutput, "-r,--redirects", "STREAMS", "to files only: 0 none, 1 stdout, 2 stderr, 3 both; by local rank: 0:1,1:2",
     &Raw::redirects},
    {kOutput, "-t,--tee", "STREAMS", "to files and the console (3 with --log-dir and no -r)", &Raw::tee},
    {kOutput, "--local-ranks-filter", "RANK,...", "show these local ranks only", &Raw::local_ranks_filter},
    {kOutput, "--duplicate-stdout-filters", "WORD,...", "lines with one of these words also to filtered_stdout.log",
     &Raw::stdout_filters},
    {kOutput, "--duplicate-stderr-filters", "WORD,...", "lines with one of these words also to filtered_stderr.log",
     &Raw::stderr_filters},
    {kOutput, "--logs-specs", "default", "torchrun's name for what lays the files out; there is one", &Raw::logs_specs},
    {kOutput, "--event-log-handler", "null|console|FILE", "what happened when, a JSON object a line", &Raw::event_log},

    {kOther, "--dry-run", nullptr, "say what would run, and run nothing", nullptr, &Raw::dry_run},
    {kOther, "-h,--help", nullptr, "show this", nullptr, &Raw::help},
    {kHidden, "--until-stdin-ends", nullptr, "end when standard input does", nullptr, &Raw::until_stdin_ends},
};

}  // namespace

std::string OptionRow::name() const {
  std::string_view all = names;
  all.remove_prefix(all.find("--"));
  return std::string(all.substr(0, all.find(',')));
}

std::span<const OptionRow> option_table() { return kTable; }

}  // namespace muster
