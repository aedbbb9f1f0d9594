// muster-rpc-load: times calls from C++ between two processes of this host, over muster and, if it was found when this
// was built, over gRPC. Prints a line of JSON for each case, with "floor" where there is one:
//   {"case": "tiny call", "unit": "us", "muster": 2.1, "grpc": 70.2, "floor": 9.8}
// A case that gRPC does not have names the number of processes as "ranks", and has a "note".
#include <fmt/format.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <thread>

#include "caller.h"
#include "child_process.h"
#include "floors.h"
#include "folder.h"
#include "many_endpoints.h"
#include "muster/base/bytes.h"
#include "muster/transport/transport.h"

namespace muster::bench {

void fail_benchmark(const std::string& why) {
  fmt::print(stderr, "muster-rpc-load: {}\n", why);
  std::_Exit(1);
}

namespace {

/// A figure of /proc/PID/status.
double memory_kib(pid_t pid, const std::string& field) {
  std::ifstream status(fmt::format("/proc/{}/status", pid));
  std::string word;
  while (status >> word) {
    double kib = 0;
    if (word == field && status >> kib) return kib;
  }
  fail_benchmark(fmt::format("/proc/{}/status has no {}", pid, field));
}

/// Makes the peak of a process the memory that it has now, and returns that.
double begin_peak(pid_t pid) {
  std::ofstream(fmt::format("/proc/{}/clear_refs", pid)) << "5";
  return memory_kib(pid, "VmHWM:");
}

/// The callers take turns in each round, so that changes of the machine's load affect all.
class Load {
 public:
  /// `servers`: the process that each caller calls.
  Load(std::map<std::string, std::unique_ptr<Caller>> callers, std::map<std::string, pid_t> servers, bool quick)
      : callers_(std::move(callers)), servers_(std::move(servers)), quick_(quick) {}

  void run() {
    latency("tiny call", 8, 1, quick_ ? 3000 : 20'000, {},
            [](int rounds) { return socket_round_trip(64, rounds, {}); });
    const Duration pause = 2ms;
    latency("tiny call, both sides asleep", 8, 1, quick_ ? 100 : 500, pause,
            [pause](int rounds) { return socket_round_trip(64, rounds, pause); });
    for (const size_t in_flight : {16, 256, 1000, 4096}) rate(in_flight);
    queueing(1000);
    memory(1000, quick_ ? 50'000 : 300'000);
    for (const size_t bytes : {size_t{64} << 10, size_t{1} << 20, size_t{64} << 20}) {
      const size_t budget = size_t{1} << (quick_ ? 28 : 30);
      const int calls = static_cast<int>(std::clamp<size_t>(budget / bytes, 6, 2000));
      latency("echo of " + format_bytes(bytes), bytes, 4, calls, {},
              [bytes](int rounds) { return copy_twice(bytes, rounds); });
    }
  }

 private:
  static constexpr int kRounds = 5;
  static constexpr int kWarmUp = 10'000;  ///< calls

  void latency(const std::string& name, size_t bytes, int messages, int calls, Duration pause,
               const std::function<double(int)>& floor) {
    std::map<std::string, std::vector<double>> times;
    for (auto& [library, caller] : callers_) {
      caller->prepare(bytes, messages);
      caller->echo(0);
    }
    for (int round = 0; round < kRounds; ++round) {
      for (auto& [library, caller] : callers_) {
        std::vector<double> calls_of_round;
        for (int i = 0; i < calls / kRounds + 1; ++i) {
          if (pause > Duration::zero()) std::this_thread::sleep_for(pause);  // tidy: allow(sleep) both sides must sleep
          const TimePoint begin = steady_clock().now();
          caller->echo(i);
          calls_of_round.push_back(microseconds_since(begin));
        }
        times[library].push_back(median(std::move(calls_of_round)));
      }
      times["floor"].push_back(floor(calls / kRounds + 1));
    }
    report(name, "us", times);
  }

  /// The calls of each caller that take about as long as a round should. The first ones warm it up.
  std::map<std::string, int> calls_of_round(size_t in_flight) {
    std::map<std::string, int> calls;
    for (auto& [library, caller] : callers_) {
      caller->prepare(8, 1);
      caller->echo_many(in_flight, kWarmUp);
      const double each = microseconds_of(*caller, in_flight, kWarmUp);
      calls[library] = std::max(static_cast<int>((quick_ ? 0.05 : 0.5) * 1e6 / each), kWarmUp);
    }
    return calls;
  }

  /// Of each call.
  static double microseconds_of(Caller& caller, size_t in_flight, int calls, std::vector<double>* times = nullptr) {
    const TimePoint begin = steady_clock().now();
    caller.echo_many(in_flight, calls, times);
    return microseconds_since(begin) / calls;
  }

  void rate(size_t in_flight) {
    std::map<std::string, std::vector<double>> rates;
    const auto calls = calls_of_round(in_flight);
    for (int round = 0; round < kRounds; ++round) {
      for (auto& [library, caller] : callers_) {
        rates[library].push_back(1e6 / microseconds_of(*caller, in_flight, calls.at(library)));
      }
    }
    report(fmt::format("calls, {} in flight", in_flight), "1/s", rates);
  }

  /// The times of calls that wait for each other. Their floor is what queueing explains: the calls in flight, divided
  /// by muster's rate.
  void queueing(size_t in_flight) {
    std::map<std::string, std::vector<double>> medians, tails;
    const auto calls = calls_of_round(in_flight);
    for (int round = 0; round < kRounds; ++round) {
      for (auto& [library, caller] : callers_) {
        std::vector<double> times;
        const double each = microseconds_of(*caller, in_flight, calls.at(library), &times);
        std::ranges::sort(times);
        medians[library].push_back(times[times.size() / 2]);
        tails[library].push_back(times[times.size() * 99 / 100]);
        if (library == "muster") {
          for (auto* figures : {&medians, &tails}) (*figures)["floor"].push_back(static_cast<double>(in_flight) * each);
        }
      }
    }
    report(fmt::format("{} in flight, median", in_flight), "us", medians);
    report(fmt::format("{} in flight, 99th percentile", in_flight), "us", tails);
  }

  /// The most memory that both processes had at a time, beyond what they had before.
  void memory(size_t in_flight, int calls) {
    std::map<std::string, std::vector<double>> growth;
    for (auto& [library, caller] : callers_) {
      double grown = 0;
      for (const pid_t pid : {getpid(), servers_.at(library)}) grown -= begin_peak(pid);
      caller->echo_many(in_flight, calls);
      for (const pid_t pid : {getpid(), servers_.at(library)}) grown += memory_kib(pid, "VmHWM:");
      growth[library].push_back(std::max(grown, 4.0));  // a page
    }
    report(fmt::format("memory, {} calls in flight", in_flight), "KiB", growth);
  }

  static void report(const std::string& name, const char* unit, std::map<std::string, std::vector<double>>& figures) {
    fmt::print("{{\"case\": \"{}\", \"unit\": \"{}\"", name, unit);
    for (auto& [library, values] : figures) fmt::print(", \"{}\": {:.6g}", library, median(std::move(values)));
    fmt::print("}}\n");
    std::fflush(stdout);
  }

  std::map<std::string, std::unique_ptr<Caller>> callers_;
  const std::map<std::string, pid_t> servers_;
  const bool quick_;
};

/// Before this process has threads.
void report_many_endpoints(const std::string& socket, const std::string& transports, int count) {
  const ManyEndpoints figures = start_many_endpoints(socket, transports, count);
  const auto report = [count](const char* what, double muster, double floor, const std::string& note) {
    fmt::print(R"({{"case": "{} endpoints {}", "unit": "ms", "ranks": {}, "muster": {:.6g}, "floor": {:.6g}, )"
               R"("note": "{}"}})"
               "\n",
               count, what, count, muster, floor, note);
  };
  report("start", figures.started, figures.floor,
         fmt::format("{} descriptors each before the first call", figures.descriptors));
  report("call all others", figures.all_pairs, 0, fmt::format("{} connections", count * (count - 1)));
  std::fflush(stdout);
}

void run(const std::string& transports, bool quick) {
  if (const auto valid = parse_transports(transports); !valid) fail_benchmark(valid.error().message);
  const Folder folder;
  report_many_endpoints(folder.file("store"), transports, quick ? 50 : 200);
  const ChildProcess muster([&] { serve_muster(folder.file("muster"), transports); });
#ifdef MUSTER_WITH_GRPC
  const ChildProcess grpc([&] { serve_grpc(folder.file("grpc")); });
#endif
  std::map<std::string, std::unique_ptr<Caller>> callers;
  std::map<std::string, pid_t> servers{{"muster", muster.pid()}};
  callers["muster"] = connect_muster(folder.file("muster"), transports);
#ifdef MUSTER_WITH_GRPC
  callers["grpc"] = connect_grpc(folder.file("grpc"));
  servers["grpc"] = grpc.pid();
#endif
  Load(std::move(callers), std::move(servers), quick).run();
}

}  // namespace
}  // namespace muster::bench

int main(int argc, char** argv) {
  CLI::App app("Times remote calls between two processes of this host");
  std::string transports = "shm,tcp";
  bool quick = false;
  app.add_option("--transports", transports, "best first, of shm, unix and tcp");
  app.add_flag("--quick", quick, "fewer rounds");
  CLI11_PARSE(app, argc, argv);
  muster::bench::run(transports, quick);
}
