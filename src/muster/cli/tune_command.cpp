#include "muster/cli/commands.h"

#include <sched.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <thread>

#include "muster/base/clock.h"
#include "muster/collective/cost/tuning.h"
#include "muster/collective/host/host_plan.h"
#include "muster/group/group.h"
#include "muster/kernels/reduce.h"
#include "muster/launch/failure.h"
#include "muster/launch/options/command_line.h"
#include "muster/shm/cpu_migrator.h"

namespace muster {
namespace {

constexpr Duration kTuneTime = std::chrono::seconds(30);
/// The number of ranks, and of the cores on which they take turns, in the measurement of a turn.
constexpr int kSharingRanks = 4, kSharedCores = 2;
constexpr size_t kSmall = 8, kLarge = 8 << 20;

/// Seconds per call of `body`: the minimum of several batches, because other load only adds time.
double seconds_each(int calls, int batches, const std::function<void()>& body) {
  double minimum = 1e9;
  for (int batch = 0; batch < batches; ++batch) {
    const TimePoint begin = steady_clock().now();
    for (int call = 0; call < calls; ++call) body();
    minimum = std::min(minimum, std::chrono::duration<double>(steady_clock().now() - begin).count() / calls);
  }
  return minimum;
}

/// One rank of a group for measurements.
class Measurement {
 public:
  explicit Measurement(Group& group) : group_(group) {}

  /// Broadcasts between two ranks are messages. Measures them back and forth, in a row, and with large messages.
  Result<LinkCost> links() {
    input_.resize(kLarge);
    const double both = seconds_each(200, 5, [this] {
      broadcast(0, kSmall);
      broadcast(1, kSmall);
    });
    const double there = both / 2;
    const double in_a_row = seconds_each(1000, 5, [this] { broadcast(0, kSmall); });
    const double large = seconds_each(4, 5, [this] { broadcast(0, kLarge); });
    MUSTER_TRY(outcome_);
    // In a row, both ends work at the same time; back and forth, they work in turn.
    LinkCost cost;
    cost.overhead = std::min(in_a_row, there / 3);
    cost.latency = there - 2 * cost.overhead;
    cost.bytes_per_second = kLarge / large;
    return cost;
  }

  /// Costs of shared memory with a core for each rank: of a step without data, and of steps that mostly copy.
  Result<MemoryCosts> memory() {
    MemoryCosts costs;
    costs.wait = seconds_each(500, 40, [this] { note(group_.barrier()); });
    costs.cached_bytes_per_second = copy_speed(kCachedTensors, 4, 60, costs.wait);
    costs.bytes_per_second = copy_speed(kUncachedTensors, 1, 20, costs.wait);
    costs.measured = true;
    MUSTER_TRY(outcome_);
    return costs;
  }

  /// The time of a step per rank, for ranks that take turns on a core.
  Result<double> turn() {
    const double step = seconds_each(50, 10, [this] { note(group_.barrier()); });
    MUSTER_TRY(outcome_);
    return step * usable_cores() / group_.membership().size;
  }

 private:
  void note(Work work) {
    auto result = work.wait();
    if (!result && outcome_) outcome_ = std::move(result);
  }
  void broadcast(Rank root, size_t bytes) { note(group_.broadcast({input_.data(), bytes, Dtype::kUint8}, root)); }

  /// Measured by all_gather: a rank's own block, its copy and the peer's block are three blocks of memory.
  double copy_speed(double tensors, int calls, int batches, double wait) {
    const auto block = static_cast<size_t>(tensors / 3);
    input_.resize(block);
    output_.resize(2 * block);
    const auto gather = [&] {
      note(group_.all_gather({input_.data(), block, Dtype::kUint8}, {output_.data(), 2 * block, Dtype::kUint8}));
    };
    const HostPlan plan = plan_on_host({.collective = Collective::kAllGather, .bytes = block, .element = 1});
    const double seconds = seconds_each(calls, batches, gather);
    // Waits overlap with copies, so the waits may seem to take all of the time.
    return plan.copied / std::max(seconds / 2, seconds - static_cast<double>(plan.waits) * wait);
  }

  Group& group_;
  Bytes input_, output_;
  Result<> outcome_;
};

/// Limits this thread to kSharedCores of its cores.
void keep_to_few_cores() {
  cpu_set_t cores, few;
  CPU_ZERO(&few);
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return;
  for (int core = 0; core < CPU_SETSIZE && CPU_COUNT(&few) < kSharedCores; ++core) {
    if (CPU_ISSET(core, &cores)) CPU_SET(core, &few);
  }
  (void)sched_setaffinity(0, sizeof few, &few);
}

/// Runs `body` at all ranks of a group, and returns the result of rank 0. The ranks are threads of this process: two,
/// or kSharingRanks. For links and shared memory, threads work like processes.
template <class T>
Result<T> measure(const std::string& transport, Result<T> (Measurement::*body)(), bool share_cores = false) {
  const auto store = memory_store();
  const int size = share_cores ? kSharingRanks : 2;
  std::vector<Result<T>> found(size);
  std::vector<std::thread> ranks(size);
  for (Rank rank = 0; rank < size; ++rank) {
    ranks[rank] = std::thread([&, rank] {
      if (share_cores) keep_to_few_cores();
      found[rank] = [&]() -> Result<T> {
        MUSTER_ASSIGN(auto own, store->clone());
        GroupOptions options;
        options.timeout = kTuneTime;
        options.transports = transport;
        const std::string name = (share_cores ? "tune-shared-" : "tune-") + transport;
        MUSTER_ASSIGN(auto group, Group::form(*own, {.rank = rank, .size = size, .name = name}, options));
        return (Measurement(*group).*body)();
      }();
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const Result<T>& each : found) MUSTER_TRY(each);
  return found[0];
}

double reduce_speed() {
  const std::vector<float> from(256 << 10, 1);
  std::vector<float> to(from.size());
  const double seconds =
      seconds_each(20, 5, [&] { reduce_into(to.data(), from.data(), from.size(), Dtype::kFloat32, ReduceOp::kSum); });
  return static_cast<double>(from.size() * sizeof(float)) / seconds;
}

Result<MachineCosts> measure_machine() {
  MachineCosts machine;
  MUSTER_ASSIGN(machine.tcp, measure("tcp", &Measurement::links));
  MUSTER_ASSIGN(machine.local, measure("unix", &Measurement::links));
  MUSTER_ASSIGN(machine.shm, measure("shm", &Measurement::links));
  MUSTER_ASSIGN(machine.memory, measure("shm", &Measurement::memory));
  MUSTER_ASSIGN(machine.memory.turn, measure("shm", &Measurement::turn, /*share_cores=*/true));
  machine.reduce_bytes_per_second = reduce_speed();
  machine.cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  machine.measured = true;
  return machine;
}

void show(const char* what, const LinkCost& cost) {
  std::printf("%-14s %8.1f us latency  %6.1f us a message  %6.2f GB/s\n", what, cost.latency * 1e6, cost.overhead * 1e6,
              cost.bytes_per_second / 1e9);
}

void show(const MachineCosts& machine) {
  show("tcp", machine.tcp);
  show("unix", machine.local);
  show("shared memory", machine.shm);
  const MemoryCosts& memory = machine.memory;
  std::printf("%-14s %8.2f us a step     %6.1f us a turn     %6.2f GB/s from caches, %.2f GB/s from memory%s\n",
              "in a node", memory.wait * 1e6, memory.turn * 1e6, memory.cached_bytes_per_second / 1e9,
              memory.bytes_per_second / 1e9, memory.measured == machine.measured ? "" : " (defaults)");
  std::printf("%-14s %8.2f GB/s on each of %d cores\n", "reducing", machine.reduce_bytes_per_second / 1e9,
              machine.cores);
}

}  // namespace

int tune_command(const std::string&, const std::vector<std::string>& args) {
  bool only_show = false;
  CLI::App app("Measures this machine, so that groups choose the fastest algorithms.", "muster tune");
  app.add_flag("--show", only_show, "print the saved results and do not measure");
  if (const auto end = parse_command_line(app, args)) return *end;
  if (only_show) {
    const auto tuning = load_tuning();
    if (!tuning) return print_error("tune", tuning.error().message, 1);
    std::printf("%s\n",
                tuning->machine.measured ? machine_path().c_str() : "defaults: `muster tune` measures this machine");
    return show(tuning->machine), 0;
  }
  const auto machine = measure_machine();
  if (!machine) return print_error("tune", machine.error().message, 1);
  show(*machine);
  if (const auto saved = save_machine(*machine); !saved) return print_error("tune", saved.error().message, 1);
  std::printf("saved to %s\n", machine_path().c_str());
  return 0;
}

}  // namespace muster
