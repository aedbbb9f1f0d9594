// A rank is killed or stopped in the middle of each collective, each rank a process: every survivor ends with an error
// that names that rank.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <tuple>

#include "group/ranks.h"
#include "muster/base/random.h"
#include "muster/collective/call.h"

namespace muster {
namespace {

constexpr int kRanks = 4;
constexpr Rank kVictim = 2;

using Case = std::tuple<Collective, int, const char*>;

Key running(Rank rank) { return "running/" + std::to_string(rank); }

/// As a data loader's worker: a child that outlives its parent and holds the parent's sockets open.
void leave_a_child(Store& store) {
  const pid_t child = fork();
  if (child == 0) {
    for (;;) pause();
  }
  (void)store.add("child", child, Deadline::after(std::chrono::seconds(30)));
}

/// Repeats one collective until it fails. Runs in a child process; never returns.
[[noreturn]] void be_a_rank(Rank rank, Collective collective, const char* transports, const std::string& path) {
  auto store = file_store(path);
  if (!store) _exit(2);
  const auto options = test::options_for(transports, std::chrono::seconds(30));
  const auto group = Group::form(**store, {rank, kRanks, "kill", 0}, options);
  if (!group) {
    std::fprintf(stderr, "rank %d: %s\n", rank, group.error().to_string().c_str());
    _exit(3);
  }
  if (rank == kVictim && (*group)->transport() == "shm") leave_a_child(**store);
  std::vector<float> data(1 << 20, 1.0f), gathered(data.size() * kRanks);
  const BufferView view{data.data(), data.size(), Dtype::kFloat32};
  const CallOptions call{.timeout = std::chrono::seconds(2)};
  for (int round = 0;; ++round) {
    if (round == 3) (void)(*store)->set(running(rank), {}, Deadline::after(std::chrono::seconds(30)));
    const auto result = collective == Collective::kAllReduce   ? (*group)->all_reduce(view, ReduceOp::kMax, call)
                        : collective == Collective::kBroadcast ? (*group)->broadcast(view, 0, call)
                        : collective == Collective::kAllGather
                            ? (*group)->all_gather(view, {gathered.data(), gathered.size(), Dtype::kFloat32}, call)
                            : (*group)->barrier(call);
    if (result.result()) continue;
    Error error = result.result().error();
    Writer out;
    out.put(error.code).put<int32_t>(error.rank).put_string(error.to_string());
    (void)(*store)->set("error/" + std::to_string(rank), out.bytes(), Deadline::after(std::chrono::seconds(30)));
    _exit(0);
  }
}

class GroupKill : public testing::TestWithParam<Case> {};

TEST_P(GroupKill, EverySurvivorNamesTheVictim) {
  const auto [collective, signal, transports] = GetParam();
  const std::string path = testing::TempDir() + "muster-kill-" + std::to_string(getpid());
  std::filesystem::remove(path);
  pid_t children[kRanks];
  for (Rank rank = 0; rank < kRanks; ++rank) {
    children[rank] = fork();
    ASSERT_GE(children[rank], 0);
    if (children[rank] == 0) be_a_rank(rank, collective, transports, path);
  }
  auto store = file_store(path);
  ASSERT_TRUE(store);
  for (Rank rank = 0; rank < kRanks; ++rank) {
    ASSERT_TRUE((*store)->wait({running(rank)}, Deadline::after(std::chrono::seconds(60)))) << "rank " << rank;
  }
  Random random(testing::UnitTest::GetInstance()->random_seed() + 17);
  // tidy: allow(sleep) anywhere within a round
  usleep(static_cast<useconds_t>(random.below(20'000)));
  kill(children[kVictim], signal);

  for (Rank rank = 0; rank < kRanks; ++rank) {
    if (rank == kVictim) continue;
    const auto record = (*store)->get("error/" + std::to_string(rank), Deadline::after(std::chrono::seconds(60)));
    ASSERT_TRUE(record) << "rank " << rank << " has not ended";
    Reader in(*record);
    const auto code = *in.get<ErrorCode>();
    const auto blamed = *in.get<int32_t>();
    const auto text = *in.get_string();
    EXPECT_EQ(code, signal == SIGKILL ? ErrorCode::kPeerLost : ErrorCode::kTimeout) << text;
    EXPECT_EQ(blamed, kVictim) << "rank " << rank << ": " << text;
  }
  kill(children[kVictim], SIGKILL);
  for (const pid_t child : children) waitpid(child, nullptr, 0);
  if (std::string(transports) == "shm") {
    const auto left = (*store)->add("child", 0, Deadline::after(std::chrono::seconds(10)));
    ASSERT_TRUE(left && *left > 0);
    kill(static_cast<pid_t>(*left), SIGKILL);
  }
  std::filesystem::remove(path);
}

std::string case_name(const testing::TestParamInfo<Case>& info) {
  const auto [collective, signal, transports] = info.param;
  return std::string(name(collective)) + (signal == SIGKILL ? "_killed_" : "_stopped_") + transports;
}

INSTANTIATE_TEST_SUITE_P(Cases, GroupKill,
                         testing::Combine(testing::Values(Collective::kAllReduce, Collective::kBroadcast,
                                                          Collective::kAllGather, Collective::kBarrier),
                                          testing::Values(SIGKILL, SIGSTOP), testing::Values("shm", "unix", "tcp")),
                         case_name);

}  // namespace
}  // namespace muster
