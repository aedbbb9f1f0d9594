// muster-rpc-load: times calls between two processes of this host. Prints a line of JSON for each case:
//   {"case": "tiny call", "unit": "us", "muster": 2.1, "floor": 9.8}
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <thread>

#include "floors.h"
#include "muster/rpc/endpoint.h"

namespace muster::bench {
namespace {

using rpc::Agent;
using rpc::Buffer;
using rpc::Future;
using rpc::Message;

constexpr Duration kPatience = 60s;

struct Settings {
  std::string transports = "shm,tcp";
  bool quick = false;
};

std::shared_ptr<Agent> join(const std::string& path, const std::string& name, const Settings& settings) {
  rpc::EndpointOptions options;
  options.name = name;
  options.transports = settings.transports;
  options.interface = "127.0.0.1";
  auto agent = rpc::start_endpoint(file_store(path).value(), options);
  if (!agent) {
    fmt::print(stderr, "muster-rpc-load: {}\n", agent.error().to_string());
    std::exit(1);
  }
  return *agent;
}

[[noreturn]] void serve(const std::string& path, const Settings& settings) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const auto agent = join(path, "worker", settings);
  (void)agent->add_function(
      "echo", [](rpc::Request request, rpc::Responder responder) { responder.reply(std::move(request.arguments)); },
      {});
  for (;;) pause();
}

class Load {
 public:
  Load(std::shared_ptr<Agent> agent, const Settings& settings) : agent_(std::move(agent)), quick_(settings.quick) {}

  void run() {
    const int rounds = quick_ ? 3000 : 30'000;
    const Message tiny{Bytes(8), {}};
    (void)latency(tiny, 1000, {});  // connects
    report("tiny call", "us", latency(tiny, rounds, {}), socket_round_trip(64, rounds, {}));
    const int sleeps = quick_ ? 200 : 1000;
    report("tiny call, both sides asleep", "us", latency(tiny, sleeps, 2ms), socket_round_trip(64, sleeps, 2ms));
    for (const size_t flight : {16, 256, 4096}) {
      report(fmt::format("calls per second, {} in flight", flight), "/s",
             rate(tiny, flight, quick_ ? 100'000 : 1'000'000), 0);
    }
    report("latency at 1000 in flight", "us", 1e6 * 1000 / rate(tiny, 1000, 200'000), 0);
    for (const size_t bytes : {size_t{64} << 10, size_t{1} << 20, size_t{64} << 20}) {
      const int echoes = static_cast<int>(std::clamp<size_t>((size_t{1} << (quick_ ? 28 : 30)) / bytes, 5, 2000));
      report(fmt::format("echo of {}", format_bytes(bytes)), "us", echo(bytes, echoes), copy_twice(bytes, echoes));
    }
  }

 private:
  static void report(const std::string& name, const char* unit, double value, double floor) {
    fmt::print("{{\"case\": \"{}\", \"unit\": \"{}\", \"muster\": {:.6g}, \"floor\": {:.6g}}}\n", name, unit, value,
               floor);
    std::fflush(stdout);
  }

  static double microseconds(TimePoint begin) {
    return std::chrono::duration<double, std::micro>(steady_clock().now() - begin).count();
  }

  void check(const Future& future) const {
    if (const auto& result = future.wait(); !result) {
      fmt::print(stderr, "muster-rpc-load: {}\n", result.error().to_string());
      std::exit(1);
    }
  }

  double latency(const Message& message, int rounds, Duration pause) const {
    std::vector<double> times;
    for (int i = 0; i < rounds; ++i) {
      if (pause > Duration::zero())
        std::this_thread::sleep_for(pause);  // tidy: allow(sleep) the worker must sleep, too
      const TimePoint begin = steady_clock().now();
      check(agent_->call("worker", "echo", message, {}));
      times.push_back(microseconds(begin));
    }
    return median(std::move(times));
  }

  double rate(const Message& message, size_t in_flight, int calls) const {
    std::deque<Future> futures;
    const TimePoint begin = steady_clock().now();
    for (int i = 0; i < calls; ++i) {
      if (futures.size() == in_flight) {
        check(futures.front());
        futures.pop_front();
      }
      futures.push_back(agent_->call("worker", "echo", message, {}));
    }
    for (const Future& future : futures) check(future);
    return calls / (microseconds(begin) / 1e6);
  }

  double echo(size_t bytes, int rounds) const {
    constexpr int kBuffers = 4;  // so that none is in a cache when its turn comes
    std::vector<Message> messages(kBuffers);
    for (Message& message : messages) {
      message.segments.push_back(Buffer::allocate(bytes));
      std::memset(message.segments.back().data(), 1, bytes);
    }
    std::vector<double> times;
    for (int i = 0; i < rounds; ++i) {
      const TimePoint begin = steady_clock().now();
      check(agent_->call("worker", "echo", messages[i % kBuffers], {}));
      times.push_back(microseconds(begin));
    }
    return median(std::move(times));
  }

  const std::shared_ptr<Agent> agent_;
  const bool quick_;
};

int run(const Settings& settings) {
  char path[] = "/tmp/muster-rpc-load-XXXXXX";
  const int file = mkstemp(path);
  if (file < 0) return 1;
  close(file);
  const pid_t worker = fork();
  if (worker == 0) serve(path, settings);
  const auto agent = join(path, "caller", settings);
  Load(agent, settings).run();
  (void)agent->shutdown(Deadline::after(kPatience));
  kill(worker, SIGKILL);
  waitpid(worker, nullptr, 0);
  std::filesystem::remove(path);
  return 0;
}

}  // namespace
}  // namespace muster::bench

int main(int argc, char** argv) {
  CLI::App app("Times remote calls between two processes of this host");
  muster::bench::Settings settings;
  app.add_option("--transports", settings.transports, "best first, of shm, unix and tcp");
  app.add_flag("--quick", settings.quick, "fewer rounds");
  CLI11_PARSE(app, argc, argv);
  return muster::bench::run(settings);
}
