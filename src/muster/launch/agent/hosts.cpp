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
#include <optional>
#include <sstream>

#include "muster/io/connect/handshake.h"
#include "muster/launch/command.h"
#include "muster/launch/failure.h"
#include "muster/launch/output/console.h"
#include "muster/launch/output/worker_output.h"
#include "muster/launch/process_tree.h"
#include "muster/launch/signals.h"
#include "muster/launch/workers/spawn_launcher.h"
#include "muster/store/url.h"

namespace muster {
namespace {

constexpr std::string_view kEndpoint = "--rdzv-endpoint=";
constexpr Duration kReportTime = std::chrono::seconds(2);  // for the others to learn of a failure and to say so

// For a shell: in single quotes, unless there is nothing in it that means something.
std::string quote(const std::string& word) {
  constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@%";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

bool has_password(std::string_view url) { return without_password(url) != url; }

// As it was given, if there is a password in it: that goes over standard input. Otherwise empty.
std::string private_endpoint(const RunOptions& options) {
  std::string endpoint;
  for (const auto& option : options.canonical_args)
    if (option.starts_with(kEndpoint) && has_password(options.rdzv_url)) endpoint = option.substr(kEndpoint.size());
  return endpoint;
}

// What a job's processes may need to know of here. Nothing that could be a secret: any user there sees a command line.
bool goes_along(const std::string& name, const std::string& value) {
  constexpr std::array kBeginnings = {"MUSTER_", "NCCL_", "GLOO_", "UCX_", "OMP_", "MKL_", "TORCH", "PYTHON", "CUDA_"};
  constexpr std::array kNever = {"SECRET", "TOKEN", "PASSWORD", "MUSTER_SSH"};
  const auto in_name = [&](const char* word) { return name.find(word) != std::string::npos; };
  const auto begins = [&](const char* beginning) { return name.starts_with(beginning); };
  return std::any_of(kBeginnings.begin(), kBeginnings.end(), begins) &&
         std::none_of(kNever.begin(), kNever.end(), in_name) && !has_password(value);
}

// The options that this run says anew for each host.
bool is_ours(const RunOptions& options, const std::string& option) {
  if (option.starts_with(kEndpoint) && has_password(options.rdzv_url)) return true;
  constexpr std::array kOurs = {"--hosts",       "--hostfile",    "--ssh",     "--nnodes",  "--node-rank",
                                "--secret-file", "--master-addr", "--dry-run", "--rdzv-id", "--master-port"};
  return std::find(kOurs.begin(), kOurs.end(), option.substr(0, option.find('='))) != kOurs.end();
}

std::vector<std::string> node_options(const RunOptions& options, size_t node) {
  std::vector<std::string> words;
  for (const auto& option : options.canonical_args)
    if (!is_ours(options, option)) words.push_back(option);
  if (!private_endpoint(options).empty()) words.push_back("--rdzv-endpoint=-");
  words.push_back(fmt::format("--nnodes={}:{}", options.nnodes_min, options.nnodes_max));
  words.push_back(fmt::format("--node-rank={}", node));
  words.push_back("--rdzv-id=" + options.run_id);
  if (options.rdzv_url.empty() && options.nnodes_max > 1) {
    words.push_back("--master-addr=" + options.master_addr);
    words.push_back(fmt::format("--master-port={}", options.master_port));
  }
  if (const int nproc = options.hosts[node].nproc; nproc > 0)
    words.push_back(fmt::format("--nproc-per-node={}", nproc));
  words.insert(words.end(), {"--secret-file=-", "--until-stdin-ends", "--", options.program});
  words.insert(words.end(), options.arguments.begin(), options.arguments.end());
  return words;
}

// One host's agent, as seen from here.
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
  ~HostsRun();
  int run();

 private:
  Result<> start();
  Result<> start_node(size_t number, const std::string& directory, const Bytes& secret);
  void on_signal(int number);
  void on_end(Node& node, int wait_status);
  void end_the_silent();
  void stop(const std::string& why, Duration grace);
  void later(Duration delay, void (HostsRun::*what)());
  void close_inputs();
  void kill();
  bool gone() const {
    return std::all_of(nodes_.begin(), nodes_.end(), [](const Node& node) { return node.pid == 0; });
  }

  const RunOptions& options_;
  std::string own_path_;
  Loop& loop_;
  Console console_;
  SpawnLauncher launcher_{loop_};
  std::unique_ptr<SignalPipe> signals_;
  std::vector<Node> nodes_;
  std::optional<Error> start_error_;
  Loop::TimerId timer_ = 0;
  bool stopping_ = false;
  int status_ = 0;
};

HostsRun::~HostsRun() {
  if (timer_ != 0) loop_.cancel(timer_);
  console_.on_room({});
}

Result<> HostsRun::start_node(size_t number, const std::string& directory, const Bytes& secret) {
  Node node;
  node.host = options_.hosts[number].host;
  const Environment environment = current_environment();
  auto words = host_command(options_, number, own_path_, directory, environment);
  MUSTER_ASSIGN(words.front(), find_program(words.front(), environment));
  MUSTER_ASSIGN(WorkerPipes pipes, WorkerPipes::open(/*keep_stdin=*/false));
  std::array<int, 2> input{};
  if (::pipe2(input.data(), O_CLOEXEC) != 0) return fail_errno(errno, "cannot make a pipe for " + node.host);
  pipes.in.reset(input[0]);
  node.in.reset(input[1]);
  const std::string prefix = fmt::format("[{}] ", node.host);
  node.out = std::make_unique<WorkerOutput>(loop_, console_, std::move(pipes.read_out),
                                            WorkerOutput::Sinks{&console_.out(), prefix, {}, {}, {}});
  node.err = std::make_unique<WorkerOutput>(loop_, console_, std::move(pipes.read_err),
                                            WorkerOutput::Sinks{&console_.err(), prefix, {}, {}, {}});
  nodes_.push_back(std::move(node));
  launcher_.start({static_cast<int>(number), words, environment, false, {}, /*has_terminal=*/false}, std::move(pipes));
  if (start_error_) return tl::unexpected(*start_error_);
  const std::string lines = host_input(options_, secret);  // they fit into the pipe: this does not block
  if (::write(nodes_.back().in.get(), lines.data(), lines.size()) < 0)
    return fail_errno(errno, "cannot pass the job's secret to the agent of " + nodes_.back().host);
  return {};
}

Result<> HostsRun::start() {
  adopt_orphans();
  launcher_.attach({
      [this](int number, pid_t pid) { nodes_[static_cast<size_t>(number)].pid = pid; },
      [this](const Error& error) { start_error_ = error; },
      [this](pid_t pid, int status) {
        const auto node = std::find_if(nodes_.begin(), nodes_.end(), [&](const Node& n) { return n.pid == pid; });
        if (node != nodes_.end()) on_end(*node, status);
      },
  });
  MUSTER_ASSIGN(signals_, SignalPipe::open(
                              loop_, options_.signals, [this](int number) { on_signal(number); },
                              [this] { launcher_.child_ended(); }));
  console_.on_room([this] {
    for (auto& node : nodes_) node.out->resume(), node.err->resume();
  });
  std::error_code ignored;
  const std::string directory = std::filesystem::current_path(ignored).string();
  const Bytes secret = options_.secret.empty() ? generate_secret() : options_.secret;
  for (size_t number = 0; number < options_.hosts.size(); ++number) MUSTER_TRY(start_node(number, directory, secret));
  return {};
}

void HostsRun::on_signal(int number) {
  if (stopping_) return kill();
  status_ = 128 + number;
  stop(fmt::format("SIG{}: stopping the hosts (once more kills the connections)", ::sigabbrev_np(number)), {});
}

void HostsRun::on_end(Node& node, int wait_status) {
  const WorkerExit exit = worker_exit(0, node.host, std::exchange(node.pid, 0), wait_status);
  node.in.reset();
  for (auto* output : {node.out.get(), node.err.get()}) {
    output->drain();
    output->finish();
  }
  if (stopping_) return;
  // The job has ended well, so its other agents leave; of a host without power ssh may never hear.
  if (exit.ok())
    return later(options_.shutdown_timeout + options_.close_timeout + kLeaveTime, &HostsRun::end_the_silent);
  const auto left = std::count_if(nodes_.begin(), nodes_.end(), [](const Node& n) { return n.pid != 0; });
  if (options_.elastic() && left >= options_.nnodes_min)
    return console_.notice(fmt::format("lost {} ({}): {} hosts are left", node.host, exit.to_string(), left));
  status_ = exit.status();
  stop(fmt::format("`muster run` on {} {}", node.host, exit.to_string()), kReportTime);
}

// The agents of a job end by themselves when one of them fails; who has not yet met the others does not.
void HostsRun::stop(const std::string& why, Duration grace) {
  stopping_ = true;
  if (!gone()) console_.notice(why);
  later(grace, &HostsRun::close_inputs);
}

void HostsRun::end_the_silent() {
  std::string silent;
  for (const auto& node : nodes_)
    if (node.pid != 0) silent += (silent.empty() ? "" : ", ") + node.host;
  stop(fmt::format("the job has ended, but not the connection to {}: closing it", silent), {});
}

void HostsRun::later(Duration delay, void (HostsRun::*what)()) {
  if (timer_ != 0) loop_.cancel(timer_);
  timer_ = loop_.after(delay, [this, what] { (this->*what)(); });
}

void HostsRun::close_inputs() {
  for (auto& node : nodes_) node.in.reset();
  later(options_.shutdown_timeout + kLeaveTime, &HostsRun::kill);
}

void HostsRun::kill() {
  for (auto& node : nodes_) node.in.reset();
  launcher_.kill();
}

int HostsRun::run() {
  if (const auto started = start(); !started) {
    console_.notice(started.error().message);
    status_ = exit_status(started.error());
    stopping_ = true;
    close_inputs();
  }
  (void)loop_.run_until([this] { return gone(); }, Deadline::never());
  console_.flush(kFlushTime);
  return status_;
}

}  // namespace

std::vector<std::string> host_command(const RunOptions& options, size_t node, const std::string& own_path,
                                      const std::string& folder, const Environment& environment) {
  std::vector<std::string> words;
  std::istringstream ssh(options.ssh);
  for (std::string word; ssh >> word;) words.push_back(word);
  std::string there = fmt::format("cd {} && exec env", quote(folder));
  for (const auto& [name, value] : environment)
    if (goes_along(name, value)) there += fmt::format(" {}", quote(fmt::format("{}={}", name, value)));
  there += fmt::format(" {} run", quote(own_path));
  for (const auto& word : node_options(options, node)) there += fmt::format(" {}", quote(word));
  words.push_back(options.hosts[node].host);
  words.push_back(there);
  return words;
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
