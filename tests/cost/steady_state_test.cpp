// A small collective in shared memory must make no allocation and no system call, unless a rank parks.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "cost/allocations.h"
#include "cost/traced.h"
#include "muster/group/group.h"

namespace muster::cost {
namespace {

constexpr int kRanks = 2;
constexpr int kCallsPerBlock = 500;
constexpr uint64_t kRequiredCalls = 200;  // required number of quiet calls of each rank
constexpr int kMaxBlocks = 400;           // limit for a busy machine, on which ranks mostly park
constexpr size_t kCount = 64;             // elements of a block

struct Case {
  const char* name;
  Work (*call)(Group& group, float* input, float* output);
};

BufferView view(float* data, size_t count) { return {data, count, Dtype::kFloat32}; }

constexpr Case kCases[] = {
    {"all_reduce of 4 bytes",
     [](Group& group, float*, float* out) { return group.all_reduce(view(out, 1), ReduceOp::kSum); }},
    {"all_reduce",
     [](Group& group, float*, float* out) { return group.all_reduce(view(out, kCount), ReduceOp::kSum); }},
    {"broadcast", [](Group& group, float*, float* out) { return group.broadcast(view(out, kCount), 0); }},
    {"reduce", [](Group& group, float*, float* out) { return group.reduce(view(out, kCount), ReduceOp::kSum, 0); }},
    {"all_gather", [](Group& group, float* in,
                      float* out) { return group.all_gather(view(in, kCount), view(out, kCount * kRanks)); }},
    {"gather",
     [](Group& group, float* in, float* out) { return group.gather(view(in, kCount), view(out, kCount * kRanks), 0); }},
    {"scatter", [](Group& group, float* in,
                   float* out) { return group.scatter(view(in, kCount * kRanks), view(out, kCount), 0); }},
    {"reduce_scatter",
     [](Group& group, float* in, float* out) {
       return group.reduce_scatter(view(in, kCount * kRanks), view(out, kCount), ReduceOp::kSum);
     }},
    {"all_to_all", [](Group& group, float* in,
                      float* out) { return group.all_to_all(view(in, kCount * kRanks), view(out, kCount * kRanks)); }},
    {"barrier", [](Group& group, float*, float*) { return group.barrier(); }},
};
constexpr size_t kCaseCount = std::size(kCases);

/// The counts of one rank and case. A quiet call is a call without system calls.
struct CallCounts {
  uint64_t calls = 0, quiet = 0;
  uint64_t system_calls = 0;  // of calls that were not quiet
  uint64_t allocations = 0;   // of quiet calls
};
using Table = std::array<std::array<CallCounts, kCaseCount>, kRanks>;

bool has_enough_calls(const Table& table, size_t number) {
  for (const auto& rank : table) {
    if (rank[number].quiet < kRequiredCalls) return false;
  }
  return true;
}

/// Both ranks make the same number of calls, because `table` changes only between barriers.
int measure(Group& group, const Counter& system_calls, size_t number, Table& table) {
  std::array<float, kCount * kRanks> input{}, output{};
  CallCounts& counts = table[group.membership().rank][number];
  for (int block = 0; block < kMaxBlocks && !has_enough_calls(table, number); ++block) {
    CallCounts now = counts;
    for (int i = 0; i < kCallsPerBlock; ++i) {
      const uint64_t before = system_calls.load(), allocated = allocations();
      const Work work = kCases[number].call(group, input.data(), output.data());
      if (!work.wait()) {
        std::fprintf(stderr, "%s: %s\n", kCases[number].name, work.result().error().to_string().c_str());
        return 1;
      }
      const uint64_t made = system_calls.load() - before;
      now.calls += 1;
      now.system_calls += made;
      if (made != 0) continue;
      now.quiet += 1;
      now.allocations += allocations() - allocated;
    }
    if (!group.barrier().wait()) return 1;
    counts = now;
    if (!group.barrier().wait()) return 1;
  }
  return 0;
}

int run_rank(int rank, const Counter& system_calls, const std::string& folder, Table& table) {
  GroupSpec membership;
  membership.rank = rank;
  membership.size = kRanks;
  Result<std::unique_ptr<Store>> store =
      open_store("file://" + folder + "/store", {}, Deadline::after(std::chrono::minutes(1)));
  if (!store) return 1;
  Result<std::unique_ptr<Group>> group = Group::form(**store, membership, {});
  if (!group) {
    std::fprintf(stderr, "%s\n", group.error().to_string().c_str());
    return 1;
  }
  for (size_t number = 0; number < kCaseCount; ++number) {
    if (const int status = measure(**group, system_calls, number, table)) return status;
  }
  return (*group)->barrier().wait() ? 0 : 1;
}

TEST(SmallCollectives, NeitherAllocateNorMakeSystemCalls) {
  if (MUSTER_SANITIZED) GTEST_SKIP() << "sanitizers allocate and make system calls of their own";
  const std::string folder = testing::TempDir() + "muster-cost-" + std::to_string(getpid());
  std::filesystem::create_directory(folder);
  const Shared<Table> table;
  const std::vector<int> statuses = run_traced(
      kRanks, [&](int rank, const Counter& system_calls) { return run_rank(rank, system_calls, folder, *table); });
  std::filesystem::remove_all(folder);
  if (statuses.empty() && std::getenv("MUSTER_REQUIRE_TRACE") != nullptr)
    FAIL() << "this process must trace its children";
  if (statuses.empty()) GTEST_SKIP() << "this process may not trace its children";
  ASSERT_EQ(statuses, std::vector<int>(kRanks, 0));
  for (size_t number = 0; number < kCaseCount; ++number) {
    for (int rank = 0; rank < kRanks; ++rank) {
      const CallCounts& counts = (*table)[rank][number];
      std::printf("%-22s rank %d: %6lu calls, %6lu without a system call, which allocated %lu times; others made %lu\n",
                  kCases[number].name, rank, counts.calls, counts.quiet, counts.allocations, counts.system_calls);
      EXPECT_GE(counts.quiet, kRequiredCalls) << kCases[number].name;
      EXPECT_EQ(counts.allocations, 0u) << kCases[number].name;
    }
  }
}

}  // namespace
}  // namespace muster::cost
