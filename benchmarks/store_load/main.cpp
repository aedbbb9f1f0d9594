// muster-store-load CASE [options]: one measurement of a store server that speaks PyTorch's TCPStore protocol. Prints
// one line of JSON. `muster bench store` starts it, for one server after the other. muster-store-load serve: muster's
// own store server, alone in a process.

#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>

#include "muster/io/socket.h"
#include "serve.h"
#include "startup.h"
#include "storm.h"

namespace muster::load {
namespace {

struct Options {
  ServeOptions serve;
  Startup startup;
  Storm storm;
  std::vector<std::string> servers;
  std::string server;
  double seconds = 1;
  double timeout = 300;
  Setting setting;
};

struct Command {
  const char* name;
  const char* what;
  void (*add)(CLI::App& command, Options& options);
  Result<Figures> (*run)(Options options);
};

void add_options(CLI::App& command, Options& options) {
  Setting& setting = options.setting;
  command.add_option("--server", options.server, "where it listens, as 127.0.0.1:29500; or `floor`")->required();
  command.add_option("--pid", setting.pid, "its process");
  command.add_option("--connections", setting.connections, "how many clients")->check(CLI::Range(1, 200'000));
  command.add_option("--keys", setting.keys, "of one multi_get, or of one wait")->check(CLI::Range(1, 100'000));
  command.add_option("--value", setting.value_bytes, "bytes of every value")->check(CLI::Range(1, 1 << 20));
  command.add_option("--rounds", setting.rounds, "of barrier and release")->check(CLI::Range(1, 10'000));
  command.add_option("--seconds", options.seconds, "that a closed loop takes")->check(CLI::Range(0.001, 3600.0));
  command.add_option("--timeout", options.timeout, "seconds for all of it")->check(CLI::Range(1.0, 36'000.0));
}

// Ends the floor's process with its owner.
class Floor {
 public:
  explicit Floor(pid_t child) : child_(child) {}
  ~Floor() {
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }
  Floor(const Floor&) = delete;
  Floor& operator=(const Floor&) = delete;

 private:
  pid_t child_;
};

Result<Figures> measure_floor(const Case& chosen, Setting setting) {
  if (chosen.floor == nullptr) return fail(ErrorCode::kInvalidArgument, "this case has no floor");
  EchoPlan plan = chosen.floor(setting);
  const Step greeting = greet();
  plan.greeting = {greeting.request.size(), greeting.reply_bytes};
  MUSTER_ASSIGN(const Address any, Address::parse("127.0.0.1:0"));
  MUSTER_ASSIGN(Fd listener, listen_on(any));
  MUSTER_ASSIGN(setting.server, local_address(listener.get()));
  setting.echo = true;
  setting.pid = fork();
  if (setting.pid < 0) return fail_errno(errno, "cannot fork");
  if (setting.pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const Result<> served = serve_echo(listener.get(), plan);
    std::fprintf(stderr, "muster-store-load: %s\n", served.error().to_string().c_str());
    _exit(1);
  }
  const Floor floor(setting.pid);
  listener.reset();
  return chosen.measure(setting);
}

Result<Figures> measure(const Case& chosen, Options options) {
  if (options.server == "floor") return measure_floor(chosen, options.setting);
  MUSTER_ASSIGN(options.setting.server, Address::parse(options.server));
  return chosen.measure(options.setting);
}

void add_serve(CLI::App& command, Options& options) {
  command.add_option("--upstream", options.serve.upstreams, "proxies of what is at these URLs, in turn")
      ->delimiter(',');
  command.add_option("--count", options.serve.count, "how many")->check(CLI::Range(1, 10'000));
}

Result<Figures> run_serve(Options options) {
  MUSTER_TRY(serve(options.serve));
  return Figures::object();
}

void add_peers(CLI::App& command, Peers& peers) {
  const std::map<std::string, Exchange> exchanges = {
      {"full", Exchange::kFullMesh}, {"doubling", Exchange::kDoubling}, {"ring", Exchange::kRingAndTree}};
  command.add_option("--workers", peers.workers, "in all")->check(CLI::Range(2, 1'000'000));
  command.add_option("--workers-per-node", peers.workers_per_node, "that share a proxy")->check(CLI::Range(1, 1024));
  command.add_option("--exchange", peers.exchange, "whose addresses a worker reads: full, doubling or ring")
      ->transform(CLI::CheckedTransformer(exchanges));
}

void add_startup(CLI::App& command, Options& options) {
  Startup& startup = options.startup;
  command.add_option("--servers", options.servers, "where the server of each node listens; or one for all")
      ->delimiter(',')
      ->required();
  command.add_option("--pid", options.setting.pid, "the root's process");
  command.add_option("--root", startup.root_url, "the root in muster's dialect, to ask what it did");
  command.add_flag("!--no-agents", startup.agents, "workers alone, as in a storm");
  add_peers(command, startup.peers);
  command.add_option("--timeout", options.timeout, "seconds for all of it")->check(CLI::Range(1.0, 36'000.0));
}

Result<Figures> run_startup(Options options) {
  for (const std::string& server : options.servers) {
    MUSTER_ASSIGN(options.startup.servers.emplace_back(), Address::parse(server));
  }
  return measure_startup(options.setting, options.startup);
}

void add_storm(CLI::App& command, Options& options) {
  Storm& storm = options.storm;
  command.add_option("--urls", storm.urls, "what the proxies connect to, in turn")->delimiter(',')->required();
  command.add_option("--root", storm.root_url, "the root, to ask what it did")->required();
  command.add_option("--pid", options.setting.pid, "the root's process");
  add_peers(command, storm.peers);
  command.add_option("--timeout", options.timeout, "seconds for all of it")->check(CLI::Range(1.0, 36'000.0));
}

Result<Figures> run_storm(Options options) { return measure_storm(options.setting, options.storm); }

void prepare(Options& options) {
  const auto duration = [](double seconds) {
    return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
  };
  options.setting.duration = duration(options.seconds);
  options.setting.deadline = Deadline::after(duration(options.timeout));
  options.setting.prefix = fmt::format("bench-{}", getpid());
  raise_descriptor_limit();
}

int report(const std::string& command, const Result<Figures>& figures) {
  if (figures) return std::printf("%s\n", figures->dump().c_str()) > 0 ? 0 : 1;
  std::fprintf(stderr, "muster-store-load %s: %s\n", command.c_str(), figures.error().to_string().c_str());
  return 1;
}

// The commands that are no cases: a server, and whole start-ups.
std::vector<Command> other_commands() {
  return {{"serve", "store servers, until standard input ends", add_serve, run_serve},
          {"startup", "a job's start-up over PyTorch's protocol", add_startup, run_startup},
          {"storm", "the start-up of a large job behind simulated nodes' proxies", add_storm, run_storm}};
}

int run(int argc, char** argv) {
  CLI::App app("Load for a store server that speaks PyTorch's TCPStore protocol", "muster-store-load");
  app.require_subcommand(1);
  Options options;
  std::vector<Case> all = closed_loops();
  for (const auto& more : {crowds(), arrivals()}) all.insert(all.end(), more.begin(), more.end());
  for (const Case& one : all) add_options(*app.add_subcommand(one.name, one.what), options);
  for (const Command& one : other_commands()) one.add(*app.add_subcommand(one.name, one.what), options);
  CLI11_PARSE(app, argc, argv);
  prepare(options);
  const std::string name = app.get_subcommands().front()->get_name();
  for (const Case& one : all) {
    if (name == one.name) return report(name, measure(one, options));
  }
  for (const Command& one : other_commands()) {
    if (name == one.name) return report(name, one.run(options));
  }
  return 1;
}

}  // namespace
}  // namespace muster::load

int main(int argc, char** argv) { return muster::load::run(argc, argv); }
