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

#include "cases.h"
#include "muster/io/socket.h"
#include "serve.h"

namespace muster::load {
namespace {

struct Options {
  ServeOptions serve;
  std::string server;
  double seconds = 1;
  double timeout = 300;
  Setting setting;
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
  options.setting.duration = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(options.seconds));
  options.setting.deadline =
      Deadline::after(std::chrono::duration_cast<Duration>(std::chrono::duration<double>(options.timeout)));
  options.setting.prefix = fmt::format("bench-{}", getpid());
  if (options.server == "floor") return measure_floor(chosen, options.setting);
  MUSTER_ASSIGN(options.setting.server, Address::parse(options.server));
  return chosen.measure(options.setting);
}

int run(int argc, char** argv) {
  CLI::App app("Load for a store server that speaks PyTorch's TCPStore protocol", "muster-store-load");
  app.require_subcommand(1);
  Options options;
  std::vector<Case> all = closed_loops();
  for (const auto& more : {crowds(), arrivals()}) all.insert(all.end(), more.begin(), more.end());
  for (const Case& one : all) add_options(*app.add_subcommand(one.name, one.what), options);
  CLI::App* serving = app.add_subcommand("serve", "store servers, until standard input ends");
  serving->add_option("--upstream", options.serve.upstream, "proxies of the root at this URL");
  serving->add_option("--count", options.serve.count, "how many")->check(CLI::Range(1, 10'000));
  CLI11_PARSE(app, argc, argv);
  raise_descriptor_limit();
  if (serving->parsed()) {
    const Result<> served = serve(options.serve);
    if (!served) std::fprintf(stderr, "muster-store-load serve: %s\n", served.error().to_string().c_str());
    return served ? 0 : 1;
  }
  for (const Case& one : all) {
    if (!app.got_subcommand(one.name)) continue;
    const auto figures = measure(one, options);
    if (figures) return std::printf("%s\n", figures->dump().c_str()) > 0 ? 0 : 1;
    std::fprintf(stderr, "muster-store-load %s: %s\n", one.name, figures.error().to_string().c_str());
  }
  return 1;
}

}  // namespace
}  // namespace muster::load

int main(int argc, char** argv) { return muster::load::run(argc, argv); }
