// Simulates starts of jobs over tiers of proxies. A seed determines the faults. The default is a few thousand workers.
// To run at full size:
//
//   MUSTER_WORKERS=100000 MUSTER_ROUNDS=5 MUSTER_SEED=1 start_up_test
#include "sim/start_up.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>

#include "store/linear_run.h"

namespace muster {
namespace {

int workers_or(int usual) {
  const char* text = std::getenv("MUSTER_WORKERS");
  return text != nullptr ? static_cast<int>(std::strtol(text, nullptr, 10)) : usual;
}

StartUp::Options job(int workers, int fanout = 0) {
  StartUp::Options options;
  options.tiers.nodes = 1 + (workers + options.workers_per_node - 1) / options.workers_per_node;
  options.tiers.fanout = fanout;
  return options;
}

// Prints the cost of a run if MUSTER_WORKERS is set.
void report(const char* what, uint64_t seed, StartUp& job) {
  if (std::getenv("MUSTER_WORKERS") == nullptr) return;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  std::printf(
      "%s, seed %llu: %d of %d workers in %.0f ms of virtual time, %llu events, %llu frames and %s at the root, "
      "%llu cuts, %s resident, %ld s of CPU so far\n",
      what, static_cast<unsigned long long>(seed), job.succeeded(), job.workers(),
      static_cast<double>(job.took().count()) * 1e-6, static_cast<unsigned long long>(job.tiers().time().steps()),
      static_cast<unsigned long long>(job.tiers().root_frames()), format_bytes(job.tiers().root_bytes()).c_str(),
      static_cast<unsigned long long>(job.tiers().cuts()),
      format_bytes(static_cast<uint64_t>(usage.ru_maxrss) << 10).c_str(), usage.ru_utime.tv_sec);
  for (const auto& [code, failure] : job.failures()) {
    std::printf("  %d x %s: %s\n", failure.first, name(code), failure.second.c_str());
  }
}

// Runs a job for each seed. `inject_faults` injects faults. Every worker must succeed or end with an error.
void run_jobs(const char* what, const StartUp::Options& options, bool all_succeed,
              const std::function<void(StartUp&)>& inject_faults) {
  for (int round = 0; round < rounds_or(3); ++round) {
    const uint64_t seed = seed_or(1) + static_cast<uint64_t>(round);
    StartUp job(options, seed);
    inject_faults(job);
    const auto outcome = job.run();
    ASSERT_TRUE(outcome.has_value()) << what << ", seed " << seed << ": " << outcome.error().to_string();
    for (const auto& [code, failure] : job.failures()) {
      EXPECT_TRUE(code == ErrorCode::kTimeout || code == ErrorCode::kPeerLost) << seed << ": " << failure.second;
      EXPECT_FALSE(failure.second.empty());
    }
    if (all_succeed) {
      EXPECT_EQ(job.succeeded(), job.workers()) << what << ", seed " << seed;
    }
    report(what, seed, job);
  }
}

TEST(SimulatedStart, SucceedsUnderDelay) {
  run_jobs("delay", job(workers_or(2000)), true, [](StartUp&) {});
}

TEST(SimulatedStart, SucceedsThroughAMiddleTier) {
  run_jobs("middle tier", job(workers_or(2000), 32), true, [](StartUp&) {});
}

TEST(SimulatedStart, SucceedsWhenLinksAreCut) {
  for (const int fanout : {0, 32}) {
    StartUp::Options options = job(workers_or(1000), fanout);
    options.tiers.cut = 0.02;
    run_jobs("cuts", options, true, [](StartUp&) {});
  }
}

TEST(SimulatedStart, SucceedsAfterAPartition) {
  run_jobs("partition", job(workers_or(1000), 16), true, [](StartUp& job) {
    Random& random = job.tiers().random();
    for (int i = 0; i < 20; ++i) {
      const int node = 1 + static_cast<int>(random.below(static_cast<uint64_t>(job.workers() / 8)));
      const Duration how_long(random.below(12'000'000'000));
      job.tiers().time().after(Duration(random.below(40'000'000)),
                               [&job, node, how_long] { job.tiers().partition(node, how_long); });
    }
  });
}

TEST(SimulatedStart, EndsWithAnErrorWhenProxiesDie) {
  run_jobs("dead proxies", job(workers_or(1000), 16), false, [](StartUp& job) {
    Random& random = job.tiers().random();
    for (int i = 0; i < 3; ++i) {
      const int node = 1 + static_cast<int>(random.below(static_cast<uint64_t>(job.workers() / 8)));
      job.tiers().time().after(Duration(random.below(40'000'000)), [&job, node] { job.tiers().crash(node); });
    }
  });
}

TEST(SimulatedStart, EndsWithAnErrorWhenTheRootDies) {
  run_jobs("dead root", job(workers_or(1000), 16), false, [](StartUp& job) {
    job.tiers().time().after(Duration(job.tiers().random().below(40'000'000)), [&job] { job.tiers().crash(0); });
  });
}

}  // namespace
}  // namespace muster
