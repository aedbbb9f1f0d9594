#include "muster/launch/tune_command.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <thread>

#include "muster/base/clock.h"
#include "muster/collective/reduce.h"
#include "muster/collective/tuning.h"
#include "muster/group/group.h"
#include "muster/launch/command_line.h"
#include "muster/launch/failure.h"

namespace muster {
namespace {

constexpr Duration kTuneTime = std::chrono::seconds(30);
constexpr size_t kSmall = 8, kLarge = 8 << 20;

/// Seconds of one of `calls` calls of `body`: the least of some batches, for whatever else runs only adds to it.
double seconds_each(int calls, const std::function<void()>& body) {
  double least = 1e9;
  for (int batch = 0; batch < 5; ++batch) {
    const TimePoint begin = steady_clock().now();
    for (int call = 0; call < calls; ++call) body();
    least = std::min(least, std::chrono::duration<double>(steady_clock().now() - begin).count() / calls);
  }
  return least;
}

/// One of two ranks. Broadcasts between two are messages: to and fro, one behind the other, or large.
class Measurement {
 public:
  Measurement(std::unique_ptr<Group> group) : group_(std::move(group)), memory_(kLarge) {}

  Result<Medium> run() {
    const double there = seconds_each(200,
                                      [this] {
                                        broadcast(0, kSmall);
                                        broadcast(1, kSmall);
                                      }) /
                         2;
    const double in_a_row = seconds_each(1000, [this] { broadcast(0, kSmall); });
    const double large = seconds_each(4, [this] { broadcast(0, kLarge); });
    MUSTER_TRY(outcome_);
    // In a row, both ends are busy at the same time; there and back, one after the other.
    Medium medium;
    medium.overhead = std::min(in_a_row, there / 3);
    medium.latency = there - 2 * medium.overhead;
    medium.bytes_per_second = kLarge / large;
    return medium;
  }

 private:
  void broadcast(Rank root, size_t bytes) {
    auto result = group_->broadcast({memory_.data(), bytes, Dtype::kUint8}, root).wait();
    if (!result && outcome_) outcome_ = std::move(result);
  }

  std::unique_ptr<Group> group_;
  Bytes memory_;
  Result<> outcome_;
};

/// Between two threads of this process, which links do not tell from processes.
Result<Medium> measure(const std::string& transport) {
  const auto store = memory_store();
  Result<Medium> mediums[2];
  std::thread ranks[2];
  for (Rank rank = 0; rank < 2; ++rank) {
    ranks[rank] = std::thread([&, rank] {
      mediums[rank] = [&]() -> Result<Medium> {
        MUSTER_ASSIGN(auto own, store->clone());
        GroupOptions options;
        options.timeout = kTuneTime;
        options.transports = transport;
        MUSTER_ASSIGN(auto group, Group::form(*own, {.rank = rank, .size = 2, .name = "tune-" + transport}, options));
        return Measurement(std::move(group)).run();
      }();
    });
  }
  for (std::thread& rank : ranks) rank.join();
  MUSTER_TRY(mediums[1]);
  return mediums[0];
}

double reduce_speed() {
  const std::vector<float> from(256 << 10, 1);
  std::vector<float> to(from.size());
  const size_t bytes = from.size() * sizeof(float);
  return static_cast<double>(bytes) /
         seconds_each(20, [&] { reduce_into(to.data(), from.data(), from.size(), Dtype::kFloat32, ReduceOp::kSum); });
}

Result<MachineCosts> measure_machine() {
  MachineCosts machine;
  MUSTER_ASSIGN(machine.tcp, measure("tcp"));
  MUSTER_ASSIGN(machine.local, measure("unix"));
  MUSTER_ASSIGN(machine.shm, measure("shm"));
  machine.reduce_bytes_per_second = reduce_speed();
  machine.cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  machine.measured = true;
  return machine;
}

void show(const char* what, const Medium& medium) {
  std::printf("%-14s %8.1f us latency  %6.1f us a message  %6.2f GB/s\n", what, medium.latency * 1e6,
              medium.overhead * 1e6, medium.bytes_per_second / 1e9);
}

void show(const MachineCosts& machine) {
  show("tcp", machine.tcp);
  show("unix", machine.local);
  show("shared memory", machine.shm);
  std::printf("%-14s %8.2f GB/s on each of %d cores\n", "reducing", machine.reduce_bytes_per_second / 1e9,
              machine.cores);
}

}  // namespace

int tune_command(const std::string&, const std::vector<std::string>& words) {
  bool only_show = false;
  CLI::App app("Measures this machine once, so that groups choose the fastest algorithms.", "muster tune");
  app.add_flag("--show", only_show, "print what is kept; measure nothing");
  if (const auto end = parse_command_line(app, words)) return *end;
  if (only_show) {
    const auto tuning = load_tuning();
    if (!tuning) return complain("tune", tuning.error().message, 1);
    std::printf("%s\n", tuning->machine.measured ? machine_path().c_str() : "guessed: `muster tune` measures them");
    return show(tuning->machine), 0;
  }
  const auto machine = measure_machine();
  if (!machine) return complain("tune", machine.error().message, 1);
  show(*machine);
  if (const auto saved = save_machine(*machine); !saved) return complain("tune", saved.error().message, 1);
  std::printf("kept in %s\n", machine_path().c_str());
  return 0;
}

}  // namespace muster
