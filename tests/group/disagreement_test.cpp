// Ranks that make different calls, or no call, or that are stopped. The tests compare the error text of each rank.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <latch>
#include <optional>

#include "group/ranks.h"
#include "muster/flight/call_site.h"
#include "muster/flight/recorder_reader.h"
#include "muster/group/engine/fingerprint_check.h"
#include "muster/io/outward_address.h"

namespace muster {
namespace {

using test::options_for;
using test::run_ranks;

constexpr int kRanks = 3;
const std::string kAdvice = "; all ranks must make the same calls in the same order";

const std::string kOthers = " at all_reduce #2 (float32[12], sum) at train.py:71" + kAdvice;

thread_local CallSite the_site = 0;

/// Sets the call site of this thread's calls, as the Python binding does.
void call_from(const std::string& site) {
  the_site = intern_call_site(site);
  set_call_site_probe([] { return the_site; });
}

std::string rank_text(Rank rank, pid_t pid = getpid()) {
  return fmt::format("rank {} (host {}, pid {})", rank, host_name(), pid);
}

using Body = std::function<Work(Group&, const CallOptions&)>;

/// Ranks 0 and 1 make `usual` as their second call, and rank 2 makes `deviation`. Returns the error of each rank.
std::vector<Error> disagree(const std::string& transport, const Body& usual, const Body& deviation) {
  const auto store = memory_store();
  std::vector<Error> errors(kRanks);
  std::latch over(kRanks);  // a recorder exists only as long as its group
  run_ranks(kRanks, [&](Rank rank) {
    const auto group = Group::form(*store, {rank, kRanks, "test", 0}, options_for(transport));
    ASSERT_TRUE(group) << group.error().to_string();
    call_from("train.py:69");
    ASSERT_TRUE((*group)->barrier().result());
    call_from(rank == 2 ? "train.py:80" : "train.py:71");
    const auto result = (rank == 2 ? deviation : usual)(**group, {.timeout = std::chrono::seconds(30)}).result();
    if (!result) errors[rank] = result.error();
    over.arrive_and_wait();
  });
  return errors;
}

float memory[kRanks][64];

BufferView floats(Group& group, size_t count) { return {memory[group.membership().rank], count, Dtype::kFloat32}; }

const Body kUsual = [](Group& group, const CallOptions& options) {
  return group.all_reduce(floats(group, 12), ReduceOp::kSum, options);
};

struct Deviation {
  const char* what;
  Body body;
  const char* text;
};

const Deviation kDeviations[] = {
    {"collective", [](Group& g, const CallOptions& o) { return g.broadcast(floats(g, 12), 0, o); },
     "broadcast #2 (float32[12], root 0)"},
    {"shape", [](Group& g, const CallOptions& o) { return g.all_reduce(floats(g, 10), ReduceOp::kSum, o); },
     "all_reduce #2 (float32[10], sum)"},
    {"dtype",
     [](Group& g, const CallOptions& o) {
       return g.all_reduce({memory[g.membership().rank], 12, Dtype::kInt32}, ReduceOp::kSum, o);
     },
     "all_reduce #2 (int32[12], sum)"},
    {"op", [](Group& g, const CallOptions& o) { return g.all_reduce(floats(g, 12), ReduceOp::kMax, o); },
     "all_reduce #2 (float32[12], max)"},
    {"order", [](Group& g, const CallOptions& o) { return g.barrier(o); }, "barrier #2"},
};

/// Calls are compared as they arrive. A rank may not have arrived yet when the first two calls differ.
TEST(Disagreement, IsFoundInSharedMemoryAtNoCost) {
  for (const Deviation& deviation : kDeviations) {
    for (const Error& error : disagree("shm", kUsual, deviation.body)) {
      EXPECT_EQ(error.code, ErrorCode::kMismatch) << deviation.what << ": " << error.to_string();
      const std::string prefix = fmt::format("rank 2 is at {} at train.py:80, ", deviation.text);
      EXPECT_THAT(error.message, testing::AnyOf(testing::HasSubstr(prefix + "the others" + kOthers),
                                                testing::HasSubstr(prefix + "rank 0" + kOthers),
                                                testing::HasSubstr(prefix + "rank 1" + kOthers)));
    }
  }
}

class DetailedDisagreement : public testing::TestWithParam<const char*> {
  void SetUp() override { setenv("MUSTER_DEBUG", "detail", 1); }
  void TearDown() override { unsetenv("MUSTER_DEBUG"); }
};
INSTANTIATE_TEST_SUITE_P(Transports, DetailedDisagreement, testing::Values("shm", "unix", "tcp"));

TEST_P(DetailedDisagreement, IsFoundBeforeTheCallRuns) {
  for (const Deviation& deviation : kDeviations) {
    for (const Error& error : disagree(GetParam(), kUsual, deviation.body)) {
      EXPECT_EQ(error.code, ErrorCode::kMismatch) << deviation.what;
      EXPECT_EQ(error.message, fmt::format("rank 2 is at {} at train.py:80, the others{}", deviation.text, kOthers));
    }
  }
}

TEST(Debug, WarnsAboutAnUnknownLevel) {
  setenv("MUSTER_DEBUG", "INFO", 1);
  testing::internal::CaptureStderr();
  EXPECT_FALSE(fingerprint_check_enabled());
  unsetenv("MUSTER_DEBUG");
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              testing::HasSubstr("MUSTER_DEBUG is 'INFO', which is neither detail nor off"));
}

TEST(Debug, AcceptsTorchsSpellings) {
  testing::internal::CaptureStderr();
  for (const auto& [level, detailed] : {std::pair("DETAIL", true), std::pair("OFF", false)}) {
    setenv("MUSTER_DEBUG", level, 1);
    EXPECT_EQ(fingerprint_check_enabled(), detailed) << level;
  }
  unsetenv("MUSTER_DEBUG");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

/// The probe reads state of the program's language, such as its call stack. So it must run only if its result is used.
TEST(CallSites, AreCapturedOnlyIfRecordedOrCompared) {
  static std::atomic<int> asked = 0;
  struct Setting {
    const char *recorder, *debug;
    bool asks;
  };
  for (const auto& [recorder, debug, asks] : {Setting{"0", "off", false}, {"16", "off", true}, {"0", "detail", true}}) {
    setenv("MUSTER_RECORDER", recorder, 1);
    setenv("MUSTER_DEBUG", debug, 1);
    asked = 0;
    set_call_site_probe([] { return CallSite(0 * ++asked); });
    const auto store = memory_store();
    const auto group = Group::form(*store, {0, 1, "sites", 0}, options_for("tcp"));
    ASSERT_TRUE(group);
    EXPECT_TRUE((*group)->barrier().wait());
    EXPECT_TRUE((*group)->barrier({.async = true}).wait());
    EXPECT_EQ(asked.load(), asks ? 2 : 0) << recorder << " " << debug;
  }
  set_call_site_probe(nullptr);
  unsetenv("MUSTER_RECORDER");
  unsetenv("MUSTER_DEBUG");
}

TEST_P(DetailedDisagreement, IsFoundIfRootsDiffer) {
  const auto from = [](Rank root) {
    return
        [root](Group& group, const CallOptions& options) { return group.broadcast(floats(group, 12), root, options); };
  };
  for (const Error& error : disagree(GetParam(), from(0), from(1))) {
    EXPECT_EQ(
        error.message,
        "rank 2 is at broadcast #2 (float32[12], root 1) at train.py:80, the others at broadcast #2 (float32[12], "
        "root 0) at train.py:71" +
            kAdvice);
  }
}

TEST_P(DetailedDisagreement, IsFoundBetweenTwoRanksThatExchange) {
  const auto exchange = [](std::vector<size_t> sends, std::vector<size_t> receives) {
    return [=](Group& group, const CallOptions& options) {
      static float to[kRanks][64];
      size_t in = 0, out = 0;
      for (const size_t count : sends) in += count;
      for (const size_t count : receives) out += count;
      return group.all_to_all(floats(group, in), {to[group.membership().rank], out, Dtype::kFloat32}, options, sends,
                              receives);
    };
  };
  for (const Error& error : disagree(GetParam(), exchange({1, 1, 1}, {1, 1, 2}), exchange({2, 3, 1}, {1, 1, 1}))) {
    EXPECT_EQ(error.code, ErrorCode::kMismatch);
    EXPECT_EQ(error.message, "rank 2 sends 3 elements to rank 1, which expects 2 from it");
  }
}

TEST_P(DetailedDisagreement, IsNotReportedForEqualCalls) {
  test::run_group(kRanks, GetParam(), [](Group& group) {
    for (int round = 0; round < 3; ++round) {
      std::vector<float> data(10, 1.0f);
      ASSERT_TRUE(group.all_reduce({data.data(), data.size(), Dtype::kFloat32}, ReduceOp::kSum).result());
      EXPECT_EQ(data[9], kRanks);
    }
  });
}

/// Waits until the rank, which is a thread of this process, runs that call.
void await_call(Rank rank, uint64_t sequence) {
  const auto is_there = [&](const Recording& recording) {
    const Record* const record = recording.rank == rank ? recording.find(sequence) : nullptr;
    return record != nullptr && record->state == RecordState::kRunning;
  };
  const Deadline deadline = Deadline::after(std::chrono::seconds(60));
  while (!std::ranges::any_of(recordings_of(getpid()), is_there) && !deadline.passed()) std::this_thread::yield();
  EXPECT_FALSE(deadline.passed());
}

class Absence : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Transports, Absence, testing::Values("shm", "unix", "tcp"));

TEST_P(Absence, IsReportedWithTheLastCall) {
  const auto store = memory_store();
  std::latch met(kRanks), given_up(kRanks - 1);
  run_ranks(kRanks, [&](Rank rank) {
    const auto group = Group::form(*store, {rank, kRanks, "test", 0}, options_for(GetParam()));
    ASSERT_TRUE(group) << group.error().to_string();
    call_from("train.py:69");
    ASSERT_TRUE((*group)->barrier().result());
    met.arrive_and_wait();
    if (rank == 2) return given_up.wait();
    call_from("train.py:71");
    if (rank == 0) await_call(1, 2);
    const auto timeout = rank == 0 ? std::chrono::milliseconds(300) : std::chrono::seconds(60);
    const auto result = kUsual(**group, {.timeout = timeout}).result();
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::kTimeout);
    EXPECT_EQ(result.error().rank, 2);
    EXPECT_EQ(result.error().message, "ranks 0, 1 are at all_reduce #2 (float32[12], sum) at train.py:71; " +
                                          rank_text(2) + " has not arrived, last seen at barrier #1 at train.py:69");
    given_up.count_down();
  });
}

/// Rank 1: stops its own process after one call.
[[noreturn]] void run_and_stop(const std::string& path, const char* transport) {
  auto store = file_store(path);
  if (!store) _exit(2);
  const auto group = Group::form(**store, {1, 2, "stop", 0}, options_for(transport));
  if (!group || !(*group)->barrier().result()) _exit(3);
  raise(SIGSTOP);
  _exit(0);
}

TEST_P(Absence, OfAStoppedProcessIsReportedAsSuch) {
  const std::string path = testing::TempDir() + "muster-stop-" + std::to_string(getpid());
  std::filesystem::remove(path);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) run_and_stop(path, GetParam());
  {
    auto store = file_store(path);
    ASSERT_TRUE(store);
    const auto group = Group::form(**store, {0, 2, "stop", 0}, options_for(GetParam()));
    ASSERT_TRUE(group) << group.error().to_string();
    call_from("");
    ASSERT_TRUE((*group)->barrier().result());
    ASSERT_EQ(waitpid(child, nullptr, WUNTRACED), child);
    const auto result = (*group)->barrier({.timeout = std::chrono::milliseconds(300)}).result();
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().rank, 1);
    EXPECT_EQ(result.error().message, "rank 0 is at barrier #2; " + rank_text(1, child) +
                                          " is stopped, by a signal or a debugger, last seen at barrier #1");
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace muster
