// A rank is killed or stopped in the middle of each collective, each rank a process: every survivor ends with an error
// that names that rank. CI runs each collective, each signal and each way through the house once;
// MUSTER_KILL_CASES=all runs every combination.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <tuple>

#include "group/ranks.h"
#include "muster/base/random.h"
#include "muster/collective/call.h"

namespace muster {
namespace {

constexpr int kRanks = 4;
constexpr Rank kVictim = 2;

/// "hosts" is two hosts of two ranks, with shared memory within and tcp between.
using Case = std::tuple<Collective, int, const char*>;

GroupOptions options_of(Rank rank, const std::string& transports) {
  const bool hosts = transports == "hosts";
  auto options = test::options_for(hosts ? "shm,tcp" : transports, std::chrono::seconds(30));
  if (hosts) options.host_label = std::to_string(rank / 2);
  return options;
}

Key running(Rank rank) { return "running/" + std::to_string(rank); }

/// As a data loader's worker: a child that outlives its parent and holds the parent's sockets open.
void leave_a_child(Store& store) {
  const pid_t child = fork();
  if (child == 0) {
    for (;;) pause();
  }
  (void)store.add("child", child, Deadline::after(std::chrono::seconds(30)));
}

/// The collective over all of `data`, the larger of input and output, with rank 0 for its root.
Operation operation_of(Collective collective, Rank rank, std::vector<float>& data, std::vector<float>& other) {
  const BufferView whole{data.data(), data.size(), Dtype::kFloat32}, none{nullptr, 0, Dtype::kFloat32};
  const BufferView block{other.data(), data.size() / kRanks, Dtype::kFloat32};
  Operation operation;
  operation.call.collective = collective;
  operation.call.op = ReduceOp::kMax;
  operation.input = operation.output = whole;
  switch (collective) {
    case Collective::kAllGather:
      operation.input = block;
      break;
    case Collective::kReduceScatter:
      operation.output = block;
      break;
    case Collective::kGather:
      operation.input = block;
      operation.output = rank == 0 ? whole : none;
      break;
    case Collective::kScatter:
      operation.input = rank == 0 ? whole : none;
      operation.output = block;
      break;
    case Collective::kAllToAll:
      operation.output = {other.data(), other.size(), Dtype::kFloat32};
      break;
    default:
      break;
  }
  return operation;
}

/// Repeats one collective until it fails. Runs in a child process; never returns.
[[noreturn]] void be_a_rank(Rank rank, const Case& chosen, const std::string& path) {
  const auto [collective, signal, transports] = chosen;
  auto store = file_store(path);
  if (!store) _exit(2);
  const auto group = Group::form(**store, {rank, kRanks, "kill", 0}, options_of(rank, transports));
  if (!group) {
    std::fprintf(stderr, "rank %d: %s\n", rank, group.error().to_string().c_str());
    _exit(3);
  }
  if (rank == kVictim && (*group)->transport() == "shm") leave_a_child(**store);
  std::vector<float> data(1 << 20, 1.0f), other(data.size());
  CallOptions call{.timeout = std::chrono::seconds(60)};
  for (int round = 0;; ++round) {
    if (round == 3) {
      (void)(*store)->set(running(rank), {}, Deadline::after(std::chrono::seconds(30)));
      // Only its deadline tells of a stopped rank. Before that one a loaded machine is given its time.
      if (signal == SIGSTOP) call.timeout = std::chrono::seconds(3);
    }
    const auto result = (*group)->submit(operation_of(collective, rank, data, other), call);
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
    if (children[rank] == 0) be_a_rank(rank, GetParam(), path);
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

std::vector<Case> cases() {
  const char* kWays[] = {"shm", "unix", "tcp", "hosts"};
  const char* chosen = std::getenv("MUSTER_KILL_CASES");
  std::vector<Case> all, some;
  for (int i = 1; i < kCollectiveCount; ++i) {
    const auto collective = static_cast<Collective>(i);
    for (const char* way : kWays) {
      for (const int signal : {SIGKILL, SIGSTOP}) all.emplace_back(collective, signal, way);
    }
    some.emplace_back(collective, SIGKILL, kWays[i % 4]);
  }
  // A stop costs its deadline, so fewer of them.
  some.emplace_back(Collective::kAllReduce, SIGSTOP, "shm");
  some.emplace_back(Collective::kAllGather, SIGSTOP, "tcp");
  some.emplace_back(Collective::kAllReduce, SIGSTOP, "hosts");
  return chosen != nullptr && std::string(chosen) == "all" ? all : some;
}

INSTANTIATE_TEST_SUITE_P(Cases, GroupKill, testing::ValuesIn(cases()), case_name);

}  // namespace
}  // namespace muster
