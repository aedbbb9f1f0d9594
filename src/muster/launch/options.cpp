#include "muster/launch/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "muster/io/address.h"
#include "muster/io/handshake.h"
#include "muster/launch/options_values.h"
#include "muster/launch/options_words.h"

namespace muster {
namespace {

constexpr uint16_t kDefaultPort = 29500;
constexpr int kMaxNodes = 1 << 20;
constexpr int kMaxWorkers = 1 << 16;
constexpr int kMaxRestarts = 1 << 30;

// What everything below reads from and writes to.
struct Reading {
  const RawOptions& raw;
  const Environment& environment;
  const Machine& machine;
  RunOptions options;

  std::string variable(const char* name) const {
    const auto found = environment.find(name);
    return found == environment.end() ? "" : found->second;
  }
};

Result<int> parse_nproc(const std::string& text, const Machine& machine) {
  if (text == "cpu") return machine.cpus;
  if (text == "auto") return machine.gpus > 0 ? machine.gpus : machine.xpus > 0 ? machine.xpus : machine.cpus;
  if (text == "gpu" || text == "xpu") {
    const int count = text == "gpu" ? machine.gpus : machine.xpus;
    if (count > 0) return count;
    return bad_option(fmt::format("--nproc-per-node {}: this machine shows no {}; give a number, or cpu", text,
                                  text == "gpu" ? "GPU" : "XPU"));
  }
  return parse_int("--nproc-per-node", text, 1, kMaxWorkers, "auto, cpu, gpu, xpu or a number from 1 up");
}

Result<> read_nnodes(Reading& r) {
  constexpr std::string_view kTakes = "a number of nodes from 1 up, or MIN:MAX";
  const std::string& text = r.raw.nnodes;
  const size_t colon = std::min(text.find(':'), text.size());
  const std::string most = colon < text.size() ? text.substr(colon + 1) : text;
  RunOptions& o = r.options;
  const auto refuse = [&] { return bad_option(fmt::format("--nnodes takes {}, not '{}'", kTakes, text)); };
  const auto low = parse_int("--nnodes", text.substr(0, colon), 1, kMaxNodes, kTakes);
  const auto high = parse_int("--nnodes", most, 1, kMaxNodes, kTakes);
  if (!low || !high || *low > *high) return refuse();
  o.nnodes_min = *low;
  o.nnodes_max = *high;
  if (r.raw.standalone && o.nnodes_max > 1)
    return bad_option("--standalone is for one node, and --nnodes asks for " + text);
  return {};
}

Result<> read_hosts(Reading& r) {
  RunOptions& o = r.options;
  const std::string ssh = r.variable("MUSTER_SSH");
  o.ssh = r.raw.ssh == RawOptions().ssh && !ssh.empty() ? ssh : r.raw.ssh;
  if (!r.raw.hosts.empty() && !r.raw.hostfile.empty()) return bad_option("--hosts and --hostfile exclude each other");
  if (!r.raw.hosts.empty()) {
    MUSTER_ASSIGN(o.hosts, parse_hosts("--hosts", r.raw.hosts));
  }
  if (!r.raw.hostfile.empty()) {
    MUSTER_ASSIGN(o.hosts, read_hostfile(r.raw.hostfile));
  }
  if (o.ssh.find_first_not_of(' ') == std::string::npos) return bad_option("--ssh takes a command, and this is empty");
  if (o.hosts.empty()) return {};
  if (!r.raw.node_rank.empty()) return bad_option("--hosts gives every node its rank: leave --node-rank out");
  if (r.raw.standalone) return bad_option("--standalone is for one node, and --hosts names others");
  const int count = static_cast<int>(o.hosts.size());
  if (r.raw.nnodes == RawOptions().nnodes) {
    o.nnodes_min = o.nnodes_max = count;
  } else if (count < o.nnodes_min || count > o.nnodes_max) {
    return bad_option(fmt::format("--nnodes {} and {} hosts: give one of the two, or the same", r.raw.nnodes, count));
  }
  return {};
}

Result<> read_nodes(Reading& r) {
  RunOptions& o = r.options;
  MUSTER_TRY(read_nnodes(r));
  MUSTER_TRY(read_hosts(r));
  MUSTER_ASSIGN(o.nproc, parse_nproc(r.raw.nproc, r.machine));
  if (!r.raw.node_rank.empty()) {
    const std::string takes = fmt::format("a number from 0 to {} (--nnodes {})", o.nnodes_max - 1, r.raw.nnodes);
    MUSTER_ASSIGN(o.node_rank, parse_int("--node-rank", r.raw.node_rank, 0, o.nnodes_max - 1, takes));
  }
  o.standalone = r.raw.standalone;
  o.role = r.raw.role;
  return {};
}

// Redis, etcd and files hold the rendezvous themselves: then no node has to be named.
Result<bool> read_rendezvous_url(Reading& r) {
  struct Backend {
    const char* name;
    const char* scheme;
  };
  constexpr std::array<Backend, 4> kOthers = {
      {{"redis", "redis://"}, {"etcd", "etcd://"}, {"etcd-v2", "etcd://"}, {"file", "file://"}}};
  RunOptions& o = r.options;
  const std::string& endpoint = r.raw.rdzv_endpoint;
  const bool own = o.rdzv_backend == "static" || o.rdzv_backend == "c10d" || o.rdzv_backend == "parallel";
  for (const auto& other : kOthers) {
    if (own ? !endpoint.starts_with(other.scheme) : o.rdzv_backend != other.name) continue;
    if (own && o.rdzv_backend != RawOptions().rdzv_backend)
      return bad_option(
          fmt::format("--rdzv-backend {} and --rdzv-endpoint {} contradict each other", o.rdzv_backend, endpoint));
    const size_t scheme = endpoint.find("://");
    if (endpoint.empty() || (scheme != std::string::npos && !endpoint.starts_with(other.scheme)))
      return bad_option(fmt::format("--rdzv-backend {} needs --rdzv-endpoint {}...", other.name, other.scheme));
    o.rdzv_backend = std::string_view(other.name) == "etcd-v2" ? "etcd" : other.name;
    o.rdzv_url = scheme == std::string::npos ? other.scheme + endpoint : endpoint;
    return true;
  }
  if (own) return false;
  return bad_option("--rdzv-backend takes static, c10d, parallel, redis, etcd or file, not '" + o.rdzv_backend + "'");
}

// Below the ports that the system hands out.
uint16_t free_port() {
  constexpr int kFirst = 20000, kCount = 10000;
  const Bytes random = generate_secret();
  return static_cast<uint16_t>(kFirst + (random[0] * 256 + random[1]) % kCount);
}

Result<> read_endpoint(Reading& r) {
  RunOptions& o = r.options;
  std::string endpoint = r.raw.rdzv_endpoint;
  if (endpoint.starts_with("tcp://")) endpoint.erase(0, 6);
  o.master_addr = r.raw.master_addr;
  std::string port = r.raw.master_port;
  if (!endpoint.empty()) {
    const auto parsed = parse_host_port(endpoint, 0);
    if (!parsed || endpoint.find("://") != std::string::npos)
      return bad_option("--rdzv-endpoint takes HOST[:PORT] or a URL (redis, etcd, file, tcp), not '" +
                        r.raw.rdzv_endpoint + "'");
    o.master_addr = parsed->host;
    if (parsed->port != 0) port = std::to_string(parsed->port);
  }
  // torchrun wants IPv6 addresses in brackets here.
  if (o.master_addr.starts_with('[') && o.master_addr.ends_with(']'))
    o.master_addr = o.master_addr.substr(1, o.master_addr.size() - 2);
  const bool several = o.nnodes_max > 1;
  // Agents that are started from here are told the port: jobs may share their first host.
  o.master_port = !several ? 0 : o.hosts.empty() ? kDefaultPort : free_port();
  if (!port.empty()) {
    MUSTER_ASSIGN(const int number, parse_int("--master-port", port, 0, 65535, "a port from 0 to 65535"));
    o.master_port = static_cast<uint16_t>(number);
  }
  if (!several) return {};
  if (o.master_port == 0) return bad_option("--master-port 0: several nodes need a port that all of them know");
  if (o.master_addr.empty() && !o.hosts.empty()) o.master_addr = o.hosts.front().host;
  if (!o.master_addr.empty()) return {};
  return bad_option(fmt::format("--nnodes {} needs --master-addr: the host of node 0", r.raw.nnodes));
}

// The keys of torch's rendezvous backends; those that mean nothing here are taken and have no effect.
Result<> read_rdzv_conf(Reading& r) {
  constexpr std::array kWithoutEffect = {"rank",
                                         "store_type",
                                         "close_timeout",
                                         "etcd_prefix",
                                         "keep_alive_interval",
                                         "protocol",
                                         "keep_alive_max_attempt",
                                         "ssl_cert",
                                         "ssl_cert_key",
                                         "ca_cert",
                                         "cacert",
                                         "cert",
                                         "key"};
  RunOptions& o = r.options;
  o.last_call_timeout = std::chrono::seconds(30);  // torch's
  o.store_timeout = std::chrono::seconds(60);      // torch's
  o.heartbeat_timeout = std::chrono::seconds(10);
  MUSTER_ASSIGN(const auto pairs, parse_pairs("--rdzv-conf", r.raw.rdzv_conf));
  for (const auto& [key, value] : pairs) {
    const std::string what = "--rdzv-conf " + key;
    if (key == "join_timeout" || key == "timeout") {
      MUSTER_ASSIGN(o.timeout, parse_seconds(what, value));
    } else if (key == "last_call_timeout") {
      MUSTER_ASSIGN(o.last_call_timeout, parse_seconds(what, value));
    } else if (key == "read_timeout") {
      MUSTER_ASSIGN(o.store_timeout, parse_seconds(what, value));
    } else if (key == "heartbeat_timeout") {
      MUSTER_ASSIGN(o.heartbeat_timeout, parse_seconds(what, value));
    } else if (key == "is_host") {
      o.is_host = to_bool(value);
      if (!o.is_host) return bad_option(fmt::format("{} takes true or false, not '{}'", what, value));
    } else if (std::find(kWithoutEffect.begin(), kWithoutEffect.end(), key) == kWithoutEffect.end()) {
      return bad_option(fmt::format(
          "--rdzv-conf knows join_timeout, last_call_timeout, heartbeat_timeout, read_timeout and is_host, not '{}'",
          key));
    }
  }
  return {};
}

Result<> read_secret(Reading& r) {
  std::string text = r.variable("MUSTER_SECRET");
  std::string source = "MUSTER_SECRET";
  if (!r.raw.secret_file.empty()) {
    source = "--secret-file " + r.raw.secret_file;
    MUSTER_ASSIGN(text, read_secret_text(r.raw.secret_file));
  }
  auto secret = from_hex(text);
  if (!secret) return bad_option(source + " takes the job's secret in hex, and this is something else");
  r.options.secret = std::move(*secret);
  return {};
}

Result<> read_meeting(Reading& r) {
  RunOptions& o = r.options;
  o.rdzv_backend = r.raw.rdzv_backend;
  MUSTER_ASSIGN(const bool elsewhere, read_rendezvous_url(r));
  if (!elsewhere) MUSTER_TRY(read_endpoint(r));
  o.local_addr = r.raw.local_addr;
  o.timeout = std::chrono::seconds(300);
  MUSTER_TRY(read_rdzv_conf(r));
  if (!r.raw.timeout.empty()) {
    MUSTER_ASSIGN(o.timeout, parse_seconds("--timeout", r.raw.timeout));
  }
  MUSTER_TRY(read_secret(r));
  o.tiered = r.raw.tiered;
  MUSTER_ASSIGN(o.store_fanout, parse_int("--store-fanout", r.raw.store_fanout, 0, kMaxNodes, "a number from 0 up"));
  o.run_id = r.raw.rdzv_id;
  // Several nodes must agree on the name; "none" is torchrun's.
  if (o.run_id.empty()) {
    const Bytes random = generate_secret();
    o.run_id = o.nnodes_max > 1 && o.hosts.empty() ? "none" : to_hex(ByteView(random).first(8));
  }
  return {};
}

Result<> read_lives(Reading& r) {
  RunOptions& o = r.options;
  MUSTER_ASSIGN(o.max_restarts, parse_int("--max-restarts", r.raw.max_restarts, 0, kMaxRestarts, "a number from 0 up"));
  MUSTER_ASSIGN(o.monitor_interval, parse_seconds("--monitor-interval", r.raw.monitor_interval));
  const std::string torchs = r.variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT");
  if (!r.raw.shutdown_timeout.empty()) {
    MUSTER_ASSIGN(o.shutdown_timeout, parse_seconds("--shutdown-timeout", r.raw.shutdown_timeout));
  } else {
    MUSTER_ASSIGN(o.shutdown_timeout, parse_seconds("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", torchs.empty() ? "5" : torchs));
  }
  MUSTER_ASSIGN(o.signals, parse_signals("--signals-to-handle", r.raw.signals));
  o.preload = split_list(r.raw.preload);
  o.warm = !r.raw.no_warm;
  o.virtual_local_rank = r.raw.virtual_local_rank;
  return {};
}

Result<> read_choices(Reading& r) {
  RunOptions& o = r.options;
  const std::string& method = r.raw.start_method;
  if (method == "spawn") {
    o.start_method = StartMethod::kSpawn;
  } else if (method == "zygote" || method == "fork" || method == "forkserver") {
    o.start_method = StartMethod::kZygote;
  } else if (!method.empty()) {
    return bad_option("--start-method takes zygote or spawn (or torchrun's fork and forkserver: zygote), not '" +
                      method + "'");
  }
  constexpr std::array<std::pair<const char*, NumaBinding>, 4> kBindings = {
      {{"node", NumaBinding::kNode},
       {"socket", NumaBinding::kSocket},
       {"exclusive", NumaBinding::kExclusive},
       {"core-complex", NumaBinding::kCoreComplex}}};
  for (const auto& [name, binding] : kBindings)
    if (r.raw.numa_binding == name) o.numa_binding = binding;
  if (!r.raw.numa_binding.empty() && o.numa_binding == NumaBinding::kNone)
    return bad_option("--numa-binding takes node, socket, exclusive or core-complex, not '" + r.raw.numa_binding + "'");
  if (!r.raw.logs_specs.empty() && r.raw.logs_specs != "default")
    return bad_option("--logs-specs takes default, not '" + r.raw.logs_specs +
                      "': a Python class of torchrun's cannot be loaded here; --log-dir, -r, -t say what is kept");
  return {};
}

Result<> read_output(Reading& r) {
  RunOptions& o = r.options;
  o.log_dir = r.raw.log_dir;
  MUSTER_ASSIGN(o.redirects, parse_streams("--redirects", r.raw.redirects));
  MUSTER_ASSIGN(o.tee, parse_streams("--tee", r.raw.tee));
  const bool chosen = r.raw.redirects != RawOptions().redirects || r.raw.tee != RawOptions().tee;
  if (!o.log_dir.empty() && !chosen) o.tee.all = kBothStreams;
  MUSTER_ASSIGN(o.local_ranks_filter, parse_ranks("--local-ranks-filter", r.raw.local_ranks_filter));
  o.stdout_filters = split_list(r.raw.stdout_filters);
  o.stderr_filters = split_list(r.raw.stderr_filters);
  if (r.raw.event_log != "null") o.event_log = r.raw.event_log;
  return {};
}

Result<> read_target(const Reading& r, const std::vector<std::string>& rest, RunOptions& options) {
  using Target = RunOptions::Target;
  const RawOptions& raw = r.raw;
  if (raw.module && (raw.no_python || raw.run_path))
    return bad_option(fmt::format("--module and --{} exclude each other", raw.no_python ? "no-python" : "run-path"));
  options.target = raw.run_path    ? Target::kRunPath  // as torchrun: before --no-python
                   : raw.no_python ? Target::kProgram
                   : raw.module    ? Target::kModule
                                   : Target::kScript;
  if (rest.empty() && raw.module)
    return bad_option("no module was given: muster run [options] -m module [its arguments]");
  if (rest.empty() && options.target == Target::kProgram)
    return bad_option("no program was given: muster run [options] --no-python program [its arguments]");
  if (rest.empty()) return bad_option("no script was given: muster run [options] script.py [its arguments]");
  options.program = rest.front();
  options.arguments.assign(rest.begin() + 1, rest.end());
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
  MUSTER_ASSIGN(const OptionWords words, read_option_words(arguments, environment));
  Reading reading{words.raw, environment, machine, {}};
  reading.options.help = words.raw.help;
  reading.options.cluster = words.cluster;
  reading.options.spelled = words.spelled;
  if (words.raw.help) return reading.options;
  MUSTER_TRY(read_nodes(reading));
  MUSTER_TRY(read_meeting(reading));
  MUSTER_TRY(read_lives(reading));
  MUSTER_TRY(read_choices(reading));
  MUSTER_TRY(read_output(reading));
  MUSTER_TRY(read_target(reading, words.rest, reading.options));
  reading.options.dry_run = words.raw.dry_run;
  reading.options.until_stdin_ends = words.raw.until_stdin_ends;
  return std::move(reading.options);
}

}  // namespace muster
