// The resident memory of a group over shared memory, on all ranks together.
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "cost/allocations.h"
#include "cost/traced.h"
#include "muster/group/group.h"

namespace muster::cost {
namespace {

constexpr int kMaxRanks = 64;
constexpr size_t kMiB = 1 << 20;

/// Proportional set size (PSS) of this process in bytes: a page that n processes share counts as 1/n of a page.
size_t proportional_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string word; file >> word;) {
    size_t kilobytes = 0;
    if (word == "Pss:" && file >> kilobytes) return kilobytes << 10;
  }
  return 0;
}

struct SharedState {
  std::atomic<int> arrived[3];
  std::atomic<size_t> before[kMaxRanks], after[kMaxRanks];
};

/// Waits for all processes without using the group's memory. Waits at most 60 s.
bool wait_for_all(std::atomic<int>& arrived, int ranks) {
  arrived.fetch_add(1);
  const Deadline deadline = Deadline::after(std::chrono::seconds(60));
  while (arrived.load() < ranks) {
    if (deadline.passed()) return false;
    usleep(1000);  // tidy: allow(sleep) polls a counter with a deadline
  }
  return true;
}

int run_rank(int rank, int ranks, const std::string& folder, SharedState& state) {
  std::vector<float> data(2 * kMiB), output(2 * kMiB);  // 8 MiB each; the constructor makes them resident
  auto store = open_store("file://" + folder + "/store", {}, Deadline::after(std::chrono::minutes(1)));
  if (!store || !wait_for_all(state.arrived[0], ranks)) return 1;
  state.before[rank] = proportional_bytes();
  if (!wait_for_all(state.arrived[1], ranks)) return 1;
  GroupSpec membership;
  membership.rank = rank;
  membership.size = ranks;
  auto group = Group::form(**store, membership, {});
  if (!group) return 1;
  for (const size_t count : {size_t{1}, size_t{1} << 14, data.size()}) {
    const BufferView whole(data.data(), count, Dtype::kFloat32);
    if (!(*group)->all_reduce(whole, ReduceOp::kSum).wait() || !(*group)->broadcast(whole, 0).wait()) return 1;
    const size_t block = count / ranks;
    if (block == 0) continue;
    const BufferView all(output.data(), block * ranks, Dtype::kFloat32), own(data.data(), block, Dtype::kFloat32);
    if (!(*group)->all_gather(own, all).wait()) return 1;
  }
  if (!(*group)->barrier().wait()) return 1;
  state.after[rank] = proportional_bytes();
  return wait_for_all(state.arrived[2], ranks) ? 0 : 1;
}

size_t measure(int ranks) {
  const std::string folder = testing::TempDir() + "muster-memory-" + std::to_string(getpid());
  std::filesystem::create_directory(folder);
  const Shared<SharedState> state;
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    children.push_back(fork());
    if (children.back() != 0) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    _exit(run_rank(rank, ranks, folder, *state));
  }
  for (const pid_t child : children) {
    int status = 1;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  std::filesystem::remove_all(folder);
  size_t before = 0, after = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    before += state->before[rank];
    after += state->after[rank];
  }
  return after > before ? after - before : 0;
}

/// 2 and 8 ranks. MUSTER_RANKS=64 also measures 64 ranks.
std::vector<int> rank_counts() {
  std::vector<int> counts = {2, 8};
  if (const char* text = std::getenv("MUSTER_RANKS")) {
    int more = 2;
    std::from_chars(text, text + std::string_view(text).size(), more);
    counts.push_back(std::clamp(more, 2, kMaxRanks));
  }
  return counts;
}

TEST(AGroup, KeepsAtMost8MiBAnd4MiBForEachLocalRankResident) {
  if (MUSTER_SANITIZED) GTEST_SKIP() << "sanitizers keep memory of their own";
  for (const int ranks : rank_counts()) {
    const size_t bytes = measure(ranks);
    std::printf("%d ranks: %.1f MiB, %.2f MiB a rank\n", ranks, static_cast<double>(bytes) / kMiB,
                static_cast<double>(bytes) / kMiB / ranks);
    EXPECT_GT(bytes, 0u);
    EXPECT_LE(bytes, (8 + 4 * static_cast<size_t>(ranks)) * kMiB) << ranks << " ranks";
  }
}

}  // namespace
}  // namespace muster::cost
