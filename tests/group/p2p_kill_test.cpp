// Each rank is a process. One rank is killed in each phase of a message, and the survivor must end with an error that
// names it.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <tuple>

#include "group/ranks.h"

namespace muster {
namespace {

constexpr Rank kSurvivor = 0, kVictim = 1;

enum class Phase { kNothingSent, kLinked, kOffered, kAccepted };
const char* name(Phase phase) {
  constexpr const char* kNames[] = {"nothing_sent", "linked", "offered", "under_way"};
  return kNames[static_cast<int>(phase)];
}

using Case = std::tuple<Phase, const char*>;
using Floats = std::vector<float>;

BufferView view(Floats& data) { return {data.data(), data.size(), Dtype::kFloat32}; }

Deadline soon() { return Deadline::after(std::chrono::seconds(60)); }

/// Runs in a child process. Writes "ready" in the phase in which it is to be killed.
[[noreturn]] void run_victim(Phase phase, const char* transports, const std::string& path) {
  auto store = file_store(path);
  const auto group = Group::form(**store, {kVictim, 2, "kill", 0}, test::options_for(transports));
  if (!group) _exit(3);
  const auto ready = [&] { (void)(*store)->set("ready", {}, soon()); };
  Floats word(1), data(1 << 20);
  if (phase != Phase::kNothingSent) (void)(*group)->receive(view(word), kSurvivor, 0);
  if (phase == Phase::kAccepted) {
    for (int round = 0;; ++round) {
      if (round == 1) ready();
      (void)(*group)->receive(view(data), kSurvivor, 1);
    }
  }
  ready();
  for (;;) pause();
}

class P2pKill : public testing::TestWithParam<Case> {};

TEST_P(P2pKill, SurvivorNamesTheKilledRank) {
  const auto [phase, transports] = GetParam();
  const std::string path = testing::TempDir() + "muster-message-kill-" + std::to_string(getpid());
  std::filesystem::remove(path);
  const pid_t victim = fork();
  ASSERT_GE(victim, 0);
  if (victim == 0) run_victim(phase, transports, path);

  auto store = file_store(path);
  const auto group = Group::form(**store, {kSurvivor, 2, "kill", 0}, test::options_for(transports));
  ASSERT_TRUE(group) << group.error().to_string();
  Floats word(1), data(1 << 20);
  if (phase != Phase::kNothingSent) {
    ASSERT_TRUE((*group)->send(view(word), kVictim, 0).wait());
  }
  std::thread killer([&, waited = &**store] {
    (void)waited->wait({"ready"}, soon());
    kill(victim, SIGKILL);
  });
  Result<> result;
  if (phase == Phase::kNothingSent || phase == Phase::kLinked) {
    result = (*group)->receive(view(data), kVictim, 1).wait();
  } else {
    while ((result = (*group)->send(view(data), kVictim, 1).wait())) {
    }
  }
  killer.join();
  waitpid(victim, nullptr, 0);
  std::filesystem::remove(path);
  ASSERT_FALSE(result);
  EXPECT_NE(result.error().code, ErrorCode::kTimeout) << result.error().to_string();
  EXPECT_EQ(result.error().rank, kVictim) << result.error().to_string();
}

INSTANTIATE_TEST_SUITE_P(
    Cases, P2pKill,
    testing::Combine(testing::Values(Phase::kNothingSent, Phase::kLinked, Phase::kOffered, Phase::kAccepted),
                     testing::Values("shm", "tcp", "striped")),
    [](const auto& info) { return std::string(name(std::get<0>(info.param))) + "_" + std::get<1>(info.param); });

}  // namespace
}  // namespace muster
