#include "muster/launch/options/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <tuple>

#include "muster/launch/options/option_values.h"
#include "muster/launch/options/parse_context.h"

namespace muster {
namespace {

constexpr int kMaxRestarts = 1 << 30;

Result<int> parse_nproc(const std::string& text, const Machine& machine) {
  if (text == "cpu") return machine.cpus;
  const std::array<std::tuple<std::string_view, const char*, int>, 3> devices{
      {{"gpu", "GPU", machine.gpus}, {"xpu", "XPU", machine.xpus}, {"npu", "NPU", machine.npus}}};
  for (const auto& [option, device, count] : devices) {
    if (count > 0 && (text == option || text == "auto")) return count;
    if (text != option) continue;
    return bad_option(fmt::format("--nproc-per-node {}: this machine has no {}; give a number or cpu", option, device));
  }
  if (text == "auto") return machine.cpus;
  return parse_int("--nproc-per-node", text, 1, kMaxWorkers, "auto, cpu, gpu, xpu, npu or a number from 1 up");
}

Result<> read_nnodes(ParseContext& r) {
  constexpr std::string_view kTakes = "a number of nodes from 1 up, or MIN:MAX";
  const std::string& text = r.raw.nnodes;
  const size_t colon = std::min(text.find(':'), text.size());
  const std::string most = colon < text.size() ? text.substr(colon + 1) : text;
  RunOptions& o = r.options;
  const auto low = parse_int("--nnodes", text.substr(0, colon), 1, kMaxNodes, kTakes);
  const auto high = parse_int("--nnodes", most, 1, kMaxNodes, kTakes);
  if (!low || !high || *low > *high) return bad_value("--nnodes", kTakes, text);
  o.nnodes_min = *low;
  o.nnodes_max = *high;
  if (r.raw.standalone && o.nnodes_max > 1) return bad_option("--standalone is for one node, but --nnodes is " + text);
  return {};
}

Result<> read_hosts(ParseContext& r) {
  RunOptions& o = r.options;
  const std::string ssh = r.variable("MUSTER_SSH");
  o.ssh = r.raw.ssh == RawOptions().ssh && !ssh.empty() ? ssh : r.raw.ssh;
  if (!r.raw.hosts.empty() && !r.raw.hostfile.empty()) return bad_option("--hosts and --hostfile exclude each other");
  MUSTER_ASSIGN(o.hosts, r.raw.hostfile.empty() ? parse_hosts("--hosts", r.raw.hosts) : read_hostfile(r.raw.hostfile));
  if (o.ssh.find_first_not_of(' ') == std::string::npos)
    return bad_option("--ssh takes a command, but the value is empty");
  if (o.hosts.empty()) return {};
  if (!r.raw.node_rank.empty()) return bad_option("--hosts sets the rank of every node: do not give --node-rank");
  if (r.raw.standalone) return bad_option("--standalone and --hosts exclude each other");
  const int count = static_cast<int>(o.hosts.size());
  if (r.raw.nnodes == RawOptions().nnodes) {
    o.nnodes_min = o.nnodes_max = count;
  } else if (count < o.nnodes_min || count > o.nnodes_max) {
    return bad_option(
        fmt::format("--nnodes {} and {} hosts contradict each other: give one of them", r.raw.nnodes, count));
  }
  return {};
}

Result<> read_nodes(ParseContext& r) {
  RunOptions& o = r.options;
  MUSTER_TRY(read_nnodes(r));
  MUSTER_TRY(read_hosts(r));
  // Each host counts its own devices. Here only the syntax is checked.
  MUSTER_ASSIGN(o.nproc, parse_nproc(r.raw.nproc, o.hosts.empty() ? r.machine : Machine{1, 1, 1, 1}));
  if (!r.raw.node_rank.empty()) {
    const std::string takes = fmt::format("a number from 0 to {} (--nnodes {})", o.nnodes_max - 1, r.raw.nnodes);
    MUSTER_ASSIGN(o.node_rank, parse_int("--node-rank", r.raw.node_rank, 0, o.nnodes_max - 1, takes));
  }
  o.role = r.raw.role;
  return {};
}

Result<> read_worker_options(ParseContext& r) {
  RunOptions& o = r.options;
  MUSTER_ASSIGN(o.max_restarts, parse_int("--max-restarts", r.raw.max_restarts, 0, kMaxRestarts, "a number from 0 up"));
  MUSTER_ASSIGN(o.restart_delay, parse_seconds("--restart-delay", r.raw.restart_delay));
  MUSTER_TRY(parse_seconds("--monitor-interval", r.raw.monitor_interval));
  if (r.raw.monitor_interval != RawOptions().monitor_interval)
    o.notices.emplace_back("--monitor-interval has no effect: the end of a worker is noticed at once");
  const std::string from_torch = r.variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT");
  MUSTER_ASSIGN(o.shutdown_timeout,
                r.raw.shutdown_timeout.empty()
                    ? parse_seconds("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", from_torch.empty() ? "30" : from_torch)
                    : parse_seconds("--shutdown-timeout", r.raw.shutdown_timeout));
  MUSTER_ASSIGN(o.signals, parse_signals("--signals-to-handle", r.raw.signals));
  o.preload = split_list(r.raw.preload);
  o.warm = !r.raw.no_warm;
  o.virtual_local_rank = r.raw.virtual_local_rank;
  o.reachable_master_addr = r.raw.reachable_master_addr;
  return {};
}

Result<> read_enums(ParseContext& r) {
  RunOptions& o = r.options;
  const std::string& method = r.raw.start_method;
  if (method == "spawn") o.start_method = StartMethod::kSpawn;
  if (method == "zygote" || method == "fork" || method == "forkserver") o.start_method = StartMethod::kZygote;
  if (!method.empty() && !o.start_method)
    return bad_value("--start-method", "zygote or spawn (or torchrun's fork and forkserver: zygote)", method);
  // In the order of NumaBinding.
  constexpr std::array kBindings = {"", "node", "socket", "exclusive", "core-complex"};
  const auto binding = std::find(kBindings.begin(), kBindings.end(), r.raw.numa_binding);
  if (binding == kBindings.end())
    return bad_value("--numa-binding", "node, socket, exclusive or core-complex", r.raw.numa_binding);
  o.numa_binding = static_cast<NumaBinding>(binding - kBindings.begin());
  if (!r.raw.replace.empty() && r.raw.replace != "gloo") return bad_value("--replace", "gloo", r.raw.replace);
  o.replace_gloo = !r.raw.replace.empty();
  if (!r.raw.logs_specs.empty() && r.raw.logs_specs != "default")
    return bad_option("--logs-specs takes default, not '" + r.raw.logs_specs +
                      "': Python classes are not supported; use --log-dir, -r and -t");
  return {};
}

Result<> read_output(ParseContext& r) {
  RunOptions& o = r.options;
  o.log_dir = r.raw.log_dir;
  MUSTER_ASSIGN(o.redirects, parse_streams("--redirects", r.raw.redirects));
  MUSTER_ASSIGN(o.tee, parse_streams("--tee", r.raw.tee));
  const bool chosen = r.raw.redirects != RawOptions().redirects || r.raw.tee != RawOptions().tee;
  if (!o.log_dir.empty() && !chosen) o.tee.all = kBothStreams;
  MUSTER_ASSIGN(o.local_ranks_filter, parse_ranks("--local-ranks-filter", r.raw.local_ranks_filter));
  const auto& shown = o.local_ranks_filter;  // with several nodes another node may have more workers
  if (!shown.empty() && *shown.begin() >= o.nproc && o.hosts.empty() && o.nnodes_max == 1)
    return bad_option(
        fmt::format("--local-ranks-filter {} matches no worker: --nproc-per-node {} gives local ranks 0 to {}",
                    r.raw.local_ranks_filter, o.nproc, o.nproc - 1));
  o.stdout_filters = split_list(r.raw.stdout_filters);
  o.stderr_filters = split_list(r.raw.stderr_filters);
  o.prefix_template = r.raw.prefix_template;
  if (r.raw.event_log != "null") o.event_log = r.raw.event_log;
  return {};
}

Result<> read_target(ParseContext& r) {
  using Target = RunOptions::Target;
  const RawOptions& raw = r.raw;
  const auto& rest = r.rest;
  RunOptions& options = r.options;
  std::vector<std::string> kinds;
  if (raw.module) kinds.emplace_back("--module");
  if (raw.code) kinds.emplace_back("--code");
  if (raw.no_python || raw.run_path) kinds.emplace_back(raw.no_python ? "--no-python" : "--run-path");
  if (kinds.size() > 1) return bad_option(fmt::format("{} and {} exclude each other", kinds[0], kinds[1]));
  options.target = raw.run_path    ? Target::kRunPath  // has priority over --no-python, as in torchrun
                   : raw.no_python ? Target::kProgram
                   : raw.module    ? Target::kModule
                   : raw.code      ? Target::kCode
                                   : Target::kScript;
  if (rest.empty() && raw.module)
    return bad_option("no module was given: muster run [options] -m module [its arguments]");
  if (rest.empty() && raw.code) return bad_option("no code was given: muster run [options] -c code [its arguments]");
  if (rest.empty() && options.target == Target::kProgram)
    return bad_option("no program was given: muster run [options] --no-python program [its arguments]");
  if (rest.empty()) return bad_option("no script was given: muster run [options] script.py [its arguments]");
  options.program = rest.front();
  options.arguments.assign(rest.begin() + 1, rest.end());
  const bool is_file = options.target == Target::kScript || options.target == Target::kProgram;
  options.from_stdin = is_file && options.program == "-";
  if (options.from_stdin && !options.hosts.empty())
    return bad_option("'-' is this host's standard input: with --hosts give a file that all hosts have, or -c code");
  return {};
}

}  // namespace

Streams StreamChoice::of(int local_rank) const {
  if (by_local_rank.empty()) return all;
  const auto found = by_local_rank.find(local_rank);
  return found == by_local_rank.end() ? kNoStream : found->second;
}

Result<RunOptions> parse_run_options(const std::vector<std::string>& arguments, const Environment& environment,
                                     const Machine& machine) {
  ParseContext context{environment, machine};
  MUSTER_TRY(parse_args(arguments, context));
  // `muster run --hosts` passes an endpoint with a password on standard input. The next line is the secret.
  if (context.raw.rdzv_endpoint == "-") context.raw.rdzv_endpoint = read_stdin_line();
  context.options.help = context.raw.help;
  if (context.raw.help) return std::move(context.options);
  MUSTER_TRY(read_nodes(context));
  MUSTER_TRY(read_rendezvous(context));
  MUSTER_TRY(read_worker_options(context));
  MUSTER_TRY(read_enums(context));
  MUSTER_TRY(read_output(context));
  MUSTER_TRY(read_target(context));
  context.options.dry_run = context.raw.dry_run;
  context.options.until_stdin_ends = context.raw.until_stdin_ends;
  return std::move(context.options);
}

}  // namespace muster
