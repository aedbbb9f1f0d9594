// Each rank is a process. One rank is killed or stopped in the middle of each collective. Every survivor must have
// right results before that, and must end with an error that names the victim. CI runs each collective, each signal and
// each transport, and varies the victims, sizes and algorithms. MUSTER_KILL_CASES=all runs every combination.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>

#include "group/ranks.h"
#include "muster/base/random.h"
#include "muster/collective/algorithms/algorithms.h"
#include "muster/collective/call.h"

namespace muster {
namespace {

constexpr Rank kRoot = 0;

struct Case {
  Collective collective;
  int signal;
  /// Transports. "hosts" is two hosts of equal size, with shared memory within a host and TCP between hosts.
  std::string way;
  Rank victim = 2;
  size_t count = 1 << 20;  ///< floats of the larger of input and output
  std::string algorithm;   ///< by name; empty: chosen automatically
  int ranks = 4;

  size_t block() const { return count / ranks; }
  /// True if the victim leaves a child process. Only few cases do, because each survivor then waits a second for an
  /// orderly shutdown.
  bool leaves_a_child() const { return way == "shm" && victim == 2 && count == 1 << 20; }
};

GroupOptions options_of(Rank rank, const Case& chosen) {
  const bool hosts = chosen.way == "hosts";
  auto options = test::options_for(hosts ? "shm,tcp" : chosen.way, std::chrono::seconds(30));
  if (hosts) options.host_label = std::to_string(rank / (chosen.ranks / 2));
  return options;
}

Key running(Rank rank) { return "running/" + std::to_string(rank); }

/// Starts a child that outlives its parent and holds the parent's sockets open, like a worker of a data loader.
void leave_a_child(Store& store) {
  const pid_t child = fork();
  if (child == 0) {
    for (;;) pause();
  }
  (void)store.add("child", child, Deadline::after(std::chrono::seconds(30)));
}

/// The value of a block of the input of `rank`.
float value(int round, Rank rank, size_t block) {
  return static_cast<float>(8 * (round % 1000) + rank) + static_cast<float>(block) / 64;
}

/// One rank's memory for the collective, and its expected contents.
class Tensors {
 public:
  Tensors(const Case& chosen, Rank rank) : case_(chosen), rank_(rank), whole_(chosen.count), other_(chosen.count) {}

  Operation operation() {
    const size_t block = case_.block();
    const BufferView whole = view(whole_, whole_.size()), none = view(whole_, 0);
    Operation operation;
    operation.call.collective = case_.collective;
    operation.call.root = kRoot;
    operation.input = operation.output = whole;
    switch (case_.collective) {
      case Collective::kAllGather:
        operation.input = view(other_, block);
        break;
      case Collective::kReduceScatter:
        operation.output = view(other_, block);
        break;
      case Collective::kGather:
        operation.input = view(other_, block);
        operation.output = rank_ == kRoot ? whole : none;
        break;
      case Collective::kScatter:
        operation.input = rank_ == kRoot ? whole : none;
        operation.output = view(other_, block);
        break;
      case Collective::kAllToAll:
        operation.output = view(other_, other_.size());
        break;
      default:
        break;
    }
    return operation;
  }

  void fill(int round) {
    for (size_t i = 0; i < whole_.size(); ++i) whole_[i] = value(round, rank_, i / case_.block());
    std::fill_n(other_.begin(), case_.block(), value(round, rank_, 0));
  }

  bool right(int round) const {
    if (case_.collective == Collective::kReduce && rank_ != kRoot) return true;
    const bool within_other = case_.collective == Collective::kReduceScatter ||
                              case_.collective == Collective::kScatter || case_.collective == Collective::kAllToAll;
    const bool one_block = within_other && case_.collective != Collective::kAllToAll;
    for (size_t i = 0; i < (one_block ? case_.block() : case_.count); ++i) {
      if ((within_other ? other_ : whole_)[i] != wanted(round, i / case_.block())) return false;
    }
    return true;
  }

 private:
  static BufferView view(std::vector<float>& data, size_t count) { return {data.data(), count, Dtype::kFloat32}; }

  float wanted(int round, size_t block) const {
    const Rank from = static_cast<Rank>(block);
    const auto sum = [&](size_t of) {
      float all = 0;
      for (Rank rank = 0; rank < case_.ranks; ++rank) all += value(round, rank, of);
      return all;
    };
    switch (case_.collective) {
      case Collective::kAllReduce:
      case Collective::kReduce:
        return sum(block);
      case Collective::kReduceScatter:
        return sum(rank_);
      case Collective::kBroadcast:
        return value(round, kRoot, block);
      case Collective::kScatter:
        return value(round, kRoot, rank_);
      case Collective::kGather:
      case Collective::kAllGather:
        return rank_ == kRoot || case_.collective == Collective::kAllGather ? value(round, from, 0)
                                                                            : value(round, rank_, block);
      case Collective::kAllToAll:
        return value(round, from, rank_);
      default:
        return value(round, rank_, block);
    }
  }

  const Case& case_;
  const Rank rank_;
  std::vector<float> whole_, other_;
};

/// Repeats one collective until it fails. Runs in a child process; never returns.
[[noreturn]] void run_rank(Rank rank, const Case& chosen, const std::string& path) {
  if (!chosen.algorithm.empty()) {
    setenv("MUSTER_ALGO", (std::string(name(chosen.collective)) + "=" + chosen.algorithm).c_str(), 1);
  }
  auto store = file_store(path);
  if (!store) _exit(2);
  const auto group = Group::form(**store, {rank, chosen.ranks, "kill", 0}, options_of(rank, chosen));
  if (!group) {
    std::fprintf(stderr, "rank %d: %s\n", rank, group.error().to_string().c_str());
    _exit(3);
  }
  if (rank == chosen.victim && chosen.leaves_a_child()) leave_a_child(**store);
  Tensors tensors(chosen, rank);
  CallOptions call{.timeout = std::chrono::seconds(60)};
  for (int round = 0;; ++round) {
    if (round == 3) {
      (void)(*store)->set(running(rank), {}, Deadline::after(std::chrono::seconds(30)));
      // Only the deadline reveals a stopped rank, so this call has a short timeout. The calls before it have a long
      // one, because the machine may be loaded.
      if (chosen.signal == SIGSTOP) call.timeout = std::chrono::seconds(3);
    }
    tensors.fill(round);
    auto result = (*group)->submit(tensors.operation(), call).result();
    if (result && tensors.right(round)) continue;
    if (result) result = fail(ErrorCode::kProtocol, "the result of round " + std::to_string(round) + " is wrong");
    const Error& error = result.error();
    Writer out;
    out.put(error.code).put<int32_t>(error.rank).put_string(error.to_string());
    (void)(*store)->set("error/" + std::to_string(rank), out.bytes(), Deadline::after(std::chrono::seconds(30)));
    _exit(0);
  }
}

/// Named shared memory segments of muster.
std::set<std::string> segments() {
  std::set<std::string> names;
  std::error_code missing;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", missing)) {
    const std::string name = entry.path().filename();
    if (name.find("muster") != std::string::npos) names.insert(name);
  }
  return names;
}

class GroupKill : public testing::TestWithParam<Case> {};

TEST_P(GroupKill, EverySurvivorNamesTheKilledRank) {
  const Case& chosen = GetParam();
  const auto [collective, signal, way, victim, count, algorithm, ranks] = chosen;
  const std::string path = testing::TempDir() + "muster-kill-" + std::to_string(getpid());
  std::filesystem::remove(path);
  const auto segments_before = segments();
  std::vector<pid_t> children(ranks);
  for (Rank rank = 0; rank < ranks; ++rank) {
    children[rank] = fork();
    ASSERT_GE(children[rank], 0);
    if (children[rank] == 0) run_rank(rank, chosen, path);
  }
  auto store = file_store(path);
  ASSERT_TRUE(store);
  for (Rank rank = 0; rank < ranks; ++rank) {
    ASSERT_TRUE((*store)->wait({running(rank)}, Deadline::after(std::chrono::seconds(60)))) << "rank " << rank;
  }
  Random random(testing::UnitTest::GetInstance()->random_seed() + 17);
  // tidy: allow(sleep) anywhere within a round
  usleep(static_cast<useconds_t>(random.below(20'000)));
  kill(children[victim], signal);

  for (Rank rank = 0; rank < ranks; ++rank) {
    if (rank == victim) continue;
    const auto record = (*store)->get("error/" + std::to_string(rank), Deadline::after(std::chrono::seconds(60)));
    ASSERT_TRUE(record) << "rank " << rank << " has not ended";
    Reader in(*record);
    const auto code = *in.get<ErrorCode>();
    const auto named = *in.get<int32_t>();
    const auto text = *in.get_string();
    EXPECT_EQ(code, signal == SIGKILL ? ErrorCode::kPeerLost : ErrorCode::kTimeout) << text;
    EXPECT_EQ(named, victim) << "rank " << rank << ": " << text;
  }
  kill(children[victim], SIGKILL);
  for (const pid_t child : children) waitpid(child, nullptr, 0);
  if (chosen.leaves_a_child()) {
    const auto left = (*store)->add("child", 0, Deadline::after(std::chrono::seconds(10)));
    ASSERT_TRUE(left && *left > 0);
    kill(static_cast<pid_t>(*left), SIGKILL);
  }
  EXPECT_EQ(segments(), segments_before);
  std::filesystem::remove(path);
}

std::string case_name(const testing::TestParamInfo<Case>& info) {
  const auto& [collective, signal, way, victim, count, algorithm, ranks] = info.param;
  return std::string(name(collective)) + (signal == SIGKILL ? "_killed_" : "_stopped_") + way + "_rank" +
         std::to_string(victim) + "_of_" + std::to_string(ranks) + "_" + std::to_string(count) +
         (algorithm.empty() ? "" : "_" + algorithm);
}

/// Rank 0 is the leader of the host communicator if there are few cores.
const Case kTwentyRanks{Collective::kAllReduce, SIGKILL, "shm", 0, 40, "", 20};
constexpr const char* kWays[] = {"shm", "unix", "tcp", "hosts"};
/// Sizes that use a cache line of shared memory, a single chunk, and many chunks.
constexpr size_t kCounts[] = {16, 4096, 1 << 20};

std::vector<Case> every_case() {
  std::vector<Case> all;
  for (int i = 1; i < kCollectiveCount; ++i) {
    const auto collective = static_cast<Collective>(i);
    for (const char* way : kWays) {
      for (const size_t count : kCounts) {
        for (Rank victim = 0; victim < 4; ++victim) all.push_back({collective, SIGKILL, way, victim, count});
      }
      all.push_back({collective, SIGSTOP, way, static_cast<Rank>(i % 4)});
    }
  }
  for (const Algorithm& each : algorithms()) {
    for (const Rank victim : {0, 3}) all.push_back({each.collective, SIGKILL, "unix", victim, 1 << 20, each.name});
  }
  all.push_back(kTwentyRanks);
  return all;
}

/// A case that stops a rank lasts as long as its timeout, so there are few of them.
std::vector<Case> some_cases() {
  std::vector<Case> some;
  for (int i = 1; i < kCollectiveCount; ++i) {
    const auto collective = static_cast<Collective>(i);
    some.push_back({collective, SIGKILL, "shm", static_cast<Rank>(i % 4), kCounts[i % 3]});
    some.push_back({collective, SIGKILL, kWays[1 + i % 3], static_cast<Rank>((i + 2) % 4), kCounts[(i + 1) % 3]});
  }
  some.push_back(kTwentyRanks);
  some.push_back({Collective::kAllReduce, SIGKILL, "unix", 0, 1 << 20, "double_tree"});
  some.push_back({Collective::kAllReduce, SIGKILL, "tcp", 1, 4096, "ring"});
  some.push_back({Collective::kReduceScatter, SIGKILL, "unix", 3, 1 << 20, "pat"});
  some.push_back({Collective::kAllReduce, SIGSTOP, "shm"});
  some.push_back({Collective::kAllGather, SIGSTOP, "tcp", 0});
  some.push_back({Collective::kAllReduce, SIGSTOP, "hosts", 1});
  return some;
}

std::vector<Case> cases() {
  const char* chosen = std::getenv("MUSTER_KILL_CASES");
  return chosen != nullptr && std::string(chosen) == "all" ? every_case() : some_cases();
}

INSTANTIATE_TEST_SUITE_P(Cases, GroupKill, testing::ValuesIn(cases()), case_name);

}  // namespace
}  // namespace muster
