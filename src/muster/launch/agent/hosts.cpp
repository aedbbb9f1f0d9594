#include "muster/launch/agent/hosts.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <memory>
#include <sstream>

#include "muster/io/connect/handshake.h"
#include "muster/launch/command.h"
#include "muster/launch/failure.h"
#include "muster/launch/output/console.h"
#include "muster/launch/output/worker_output.h"
#include "muster/launch/process_tree.h"
#include "muster/launch/signals.h"
#include "muster/launch/timer.h"
#include "muster/launch/workers/worker.h"
#include "muster/store/url.h"

namespace muster {
namespace {

constexpr std::string_view kEndpoint = "--rdzv-endpoint=";
constexpr Duration kReportTime = std::chrono::seconds(2);  // for the other nodes to learn of a failure and report it

// Quotes a word for a shell if it contains special characters.
std::string quote(const std::string& word) {
  constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@%";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

bool has_password(std::string_view url) { return without_password(url) != url; }

// The value of --rdzv-endpoint if it has a password, else empty. It is sent over standard input.
std::string private_endpoint(const RunOptions& options) {
  std::string endpoint;
  for (const auto& option : options.canonical_args)
    if (option.starts_with(kEndpoint) && has_password(options.rdzv_url)) endpoint = option.substr(kEndpoint.size());
  return endpoint;
}

// True for variables that a job's processes may need on the other hosts. Secrets are not passed on, because any user
// can read a command line there.
bool is_passed_on(const std::string& name, const std::string& value) {
  constexpr std::array kPrefixes = {"MUSTER_", "NCCL_",  "GLOO_", "UCX_",    "OMP_", "MKL_",
                                    "TORCH",   "PYTHON", "CUDA_", "ASCEND_", "HCCL_"};
  constexpr std::array kNever = {"SECRET", "TOKEN", "PASSWORD", "MUSTER_SSH"};
  const auto in_name = [&](const char* word) { return name.find(word) != std::string::npos; };
  const auto has_prefix = [&](const char* prefix) { return name.starts_with(prefix); };
  return std::ranges::any_of(kPrefixes, has_prefix) && std::ranges::none_of(kNever, in_name) && !has_password(value);
}

// True for options that this run sets for each host.
bool is_set_per_host(const RunOptions& options, const std::string& option) {
  if (option.starts_with(kEndpoint) && has_password(options.rdzv_url)) return true;
  constexpr std::array kPerHost = {"--hosts",       "--hostfile",    "--ssh",     "--nnodes",  "--node-rank",
                                   "--secret-file", "--master-addr", "--dry-run", "--rdzv-id", "--master-port"};
  return std::find(kPerHost.begin(), kPerHost.end(), option.substr(0, option.find('='))) != kPerHost.end();
}

std::vector<std::string> node_options(const RunOptions& options, size_t node) {
  std::vector<std::string> args;
  for (const auto& option : options.canonical_args)
    if (!is_set_per_host(options, option)) args.push_back(option);
  if (!private_endpoint(options).empty()) args.push_back("--rdzv-endpoint=-");
  args.insert(args.end(), {fmt::format("--nnodes={}:{}", options.nnodes_min, options.nnodes_max),
                           fmt::format("--node-rank={}", node), "--rdzv-id=" + options.run_id});
  if (options.rdzv_url.empty() && options.nnodes_max > 1)
    args.insert(args.end(),
                {"--master-addr=" + options.master_addr, fmt::format("--master-port={}", options.master_port)});
  if (const int nproc = options.hosts[node].nproc; nproc > 0) args.push_back(fmt::format("--nproc-per-node={}", nproc));
  args.insert(args.end(), {"--secret-file=-", "--until-stdin-ends", "--", options.program});
  args.insert(args.end(), options.arguments.begin(), options.arguments.end());
  return args;
}

// The ssh connection to one host's agent.
struct Node {
  std::string host;
  pid_t pid = 0;  // 0: not started, or ended
  Fd in;
  std::unique_ptr<WorkerOutput> out, err;
};

class HostsRun {
 public:
  HostsRun(const RunOptions& options, std::string own_path, Loop& loop)
      : options_(options), own_path_(std::move(own_path)), loop_(loop), console_(loop) {}
  int run();

 private:
  Result<> start();
  Result<> start_node(size_t number, const std::string& directory, const Bytes& secret);
  void on_signal(int number);
  void forward(int number);
  void reap();
  void on_end(Node& node, int wait_status);
  void close_silent_hosts();
  void stop(const std::string& why, Duration grace);
  void close_inputs();
  void kill();
  auto left() const { return std::ssize(nodes_) - std::ranges::count(nodes_, 0, &Node::pid); }

  const RunOptions& options_;
  std::string own_path_;
  Loop& loop_;
  Console console_;
  std::unique_ptr<SignalPipe> signals_;
  std::vector<Node> nodes_;
  Timer timer_{loop_};
  bool stopping_ = false;
  int status_ = 0;
};

Result<> HostsRun::start_node(size_t number, const std::string& directory, const Bytes& secret) {
  Node node;
  node.host = options_.hosts[number].host;
  const Environment environment = current_environment();
  auto args = host_command(options_, number, own_path_, directory, environment);
  MUSTER_ASSIGN(args.front(), find_program(args.front(), environment));
  MUSTER_ASSIGN(WorkerPipes pipes, WorkerPipes::open(/*keep_stdin=*/false));
  std::array<int, 2> input{};
  if (::pipe2(input.data(), O_CLOEXEC) != 0) return fail_errno(errno, "cannot create a pipe for " + node.host);
  pipes.in.reset(input[0]);
  node.in.reset(input[1]);
  // Write before ssh starts, because ssh may end before it reads. The lines fit into the pipe, so this does not block.
  const std::string lines = host_input(options_, secret);
  if (::write(node.in.get(), lines.data(), lines.size()) < 0)
    return fail_errno(errno, "cannot pass the job's secret to the agent of " + node.host);
  const std::string prefix = fmt::format("[{}] ", node.host);
  node.out = std::make_unique<WorkerOutput>(loop_, console_, std::move(pipes.read_out),
                                            WorkerOutput::Sinks{&console_.out(), prefix, {}, {}, {}});
  node.err = std::make_unique<WorkerOutput>(loop_, console_, std::move(pipes.read_err),
                                            WorkerOutput::Sinks{&console_.err(), prefix, {}, {}, {}});
  MUSTER_ASSIGN(node.pid,
                spawn({static_cast<int>(number), args, environment, false, {}, /*has_terminal=*/false}, pipes));
  nodes_.push_back(std::move(node));
  return {};
}

Result<> HostsRun::start() {
  adopt_orphans();
  MUSTER_ASSIGN(signals_, SignalPipe::open(
                              loop_, handled_signals(options_.signals), [this](int number) { on_signal(number); },
                              [this] { reap(); }));
  console_.on_room([this] {
    for (auto& node : nodes_) node.out->resume(), node.err->resume();
  });
  std::error_code ignored;
  const std::string directory = std::filesystem::current_path(ignored).string();
  const Bytes secret = options_.secret.empty() ? generate_secret() : options_.secret;
  for (size_t number = 0; number < options_.hosts.size(); ++number) MUSTER_TRY(start_node(number, directory, secret));
  return {};
}

// The launcher on each host sends itself the signal that it reads (end_with_stdin() in cli/run.cpp).
void HostsRun::forward(int number) {
  const uint8_t byte = byte_of_signal(number);
  for (const auto& node : nodes_)
    if (node.in && ::write(node.in.get(), &byte, 1) != 1) console_.notice("cannot pass a signal to " + node.host);
}

void HostsRun::on_signal(int number) {
  if (!options_.ends_job(number)) return forward(number);
  if (stopping_) return kill();
  status_ = 128 + number;
  stop(signal_name(number) + ": stopping the hosts (a second signal kills the connections)", {});
}

void HostsRun::reap() {
  for (const auto& child : reap_children().ended) {
    const auto node = std::ranges::find(nodes_, child.pid, &Node::pid);
    if (node != nodes_.end()) on_end(*node, child.status);
  }
}

void HostsRun::on_end(Node& node, int wait_status) {
  const WorkerExit exit = worker_exit(0, node.host, std::exchange(node.pid, 0), wait_status);
  node.in.reset();
  node.out->finish();
  node.err->finish();
  if (stopping_) return;
  // The job has succeeded, so the other agents end. The timer is for a host that lost power, which ssh may never
  // notice.
  if (exit.ok())
    return timer_.start(options_.shutdown_timeout + options_.close_timeout + kLeaveTime,
                        [this] { close_silent_hosts(); });
  if (options_.elastic() && left() >= options_.nnodes_min)
    return console_.notice(fmt::format("lost {} ({}): {} hosts remain", node.host, exit.to_string(), left()));
  status_ = exit.status();
  stop(fmt::format("`muster run` on {} {}", node.host, exit.to_string()), kReportTime);
}

// When one agent of a job fails, the others end by themselves, except those that have not joined yet.
void HostsRun::stop(const std::string& why, Duration grace) {
  stopping_ = true;
  if (left() > 0) console_.notice(why);
  timer_.start(grace, [this] { close_inputs(); });
}

void HostsRun::close_silent_hosts() {
  std::string silent;
  for (const auto& node : nodes_)
    if (node.pid != 0) silent += (silent.empty() ? "" : ", ") + node.host;
  stop(fmt::format("the job has ended, but the connection to {} has not: closing it", silent), {});
}

void HostsRun::close_inputs() {
  for (auto& node : nodes_) node.in.reset();
  timer_.start(options_.shutdown_timeout + kLeaveTime, [this] { kill(); });
}

void HostsRun::kill() {
  for (auto& node : nodes_) {
    node.in.reset();
    if (node.pid != 0) ::kill(-node.pid, SIGKILL);  // its process group: ssh may have started a proxy
  }
  kill_children();
  // Again, because an orphan becomes a child of this process only when its parent ends.
  timer_.start(std::chrono::milliseconds(10), [this] { kill(); });
}

int HostsRun::run() {
  if (const auto started = start(); !started) {
    console_.notice(started.error().message);
    status_ = exit_status(started.error());
    stopping_ = true;
    close_inputs();
  }
  (void)loop_.run_until([this] { return left() == 0; }, Deadline::never());
  console_.flush(kFlushTime);
  return status_;
}

}  // namespace

std::vector<std::string> host_command(const RunOptions& options, size_t node, const std::string& own_path,
                                      const std::string& directory, const Environment& environment) {
  std::vector<std::string> args;
  std::istringstream ssh(options.ssh);
  for (std::string word; ssh >> word;) args.push_back(word);
  std::string remote = fmt::format("cd {} && exec env", quote(directory));
  for (const auto& [name, value] : environment)
    if (is_passed_on(name, value)) remote += fmt::format(" {}", quote(fmt::format("{}={}", name, value)));
  remote += fmt::format(" {} run", quote(own_path));
  for (const auto& word : node_options(options, node)) remote += fmt::format(" {}", quote(word));
  args.insert(args.end(), {options.hosts[node].host, remote});
  return args;
}

std::string host_input(const RunOptions& options, const Bytes& secret) {
  const std::string endpoint = private_endpoint(options);
  return (endpoint.empty() ? "" : endpoint + "\n") + to_hex(secret) + "\n";
}

int run_hosts(const RunOptions& options, const std::string& own_path) {
  ::signal(SIGPIPE, SIG_IGN);
  auto loop = Loop::create();
  if (!loop) {
    ::dprintf(STDERR_FILENO, "muster: %s\n", loop.error().message.c_str());
    return 1;
  }
  return HostsRun(options, own_path, **loop).run();
}

}  // namespace muster
