#include "muster/shm/host_comm.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>

#include "io/yields.h"
#include "muster/transport/shm/ring.h"

namespace muster {

struct HostCommSkip {
  /// Simulates steps in which this rank learns from one other rank that all ranks have published.
  static void skip(HostComm& comm, uint32_t steps) {
    comm.step_ += steps;
    comm.all_published_step_ += steps;
    for (StepRecord& record : comm.memory_->rank(comm.rank_).records) {
      record.step += steps;
      record.all_published_step += steps;
    }
  }
};

namespace test {
namespace {

Result<> no_check(Rank) { return {}; }

Deadline soon() { return Deadline::after(std::chrono::seconds(60)); }

TEST(HostComm, RefusesMemoryOfAnotherForm) {
  const Fd other_memory(memfd_create("other_memory", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(other_memory.get(), 1 << 20), 0);
  const auto refused = HostComm::attach(other_memory, 0, 2, no_check);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kProtocol);
  const auto memory = HostComm::allocate(3);
  ASSERT_TRUE(memory);
  const auto other_size = HostComm::attach(*memory, 0, 2, no_check);
  ASSERT_FALSE(other_size);
  EXPECT_EQ(other_size.error().code, ErrorCode::kMismatch);
}

/// The test expects an error. A file beyond the limit would otherwise raise a signal.
TEST(HostComm, NamesTheExceededLimitAndSoDoesALink) {
  const pid_t child = fork();
  if (child == 0) {
    const rlimit limit{1 << 20, 1 << 20};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(2);
    const auto names_the_limit = [](const auto& result) {
      return !result && result.error().code == ErrorCode::kResourceExhausted &&
             result.error().message.find("ulimit -f") != std::string::npos;
    };
    Fd link;
    _exit(names_the_limit(HostComm::allocate(8)) && names_the_limit(RingRegion::create(link)) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(HostComm, StaysWithinItsMemoryLimit) {
  for (const int size : {1, 2, 16, 64, 512}) {
    const auto memory = HostCommMemory::map(*HostComm::allocate(size), size);
    ASSERT_TRUE(memory);
    const size_t slots = (*memory)->slot_bytes() * kHostCommSlots;
    EXPECT_LE(slots, size_t{4} << 20);
    EXPECT_LE(slots * size, size_t{64} << 20);
    EXPECT_GE((*memory)->slot_bytes(), size * size_t{64}) << "a slot has room for a piece for each rank";
  }
}

/// Two ranks. One publishes numbered steps as far ahead as the protocol allows. The other checks every step.
TEST(HostComm, KeepsPublishedStepsUntilTheyAreRead) {
  const auto memory = HostComm::allocate(2);
  constexpr int kSteps = 20000;
  std::atomic<int> wrong = 0;
  const auto rank = [&](Rank self) {
    const auto comm = HostComm::attach(*memory, self, 2, no_check);
    ASSERT_TRUE(comm);
    (*comm)->open({1, 2, 3, 4});
    for (uint32_t i = 0; i < kSteps; ++i) {
      const uint32_t step = (*comm)->next();
      if (self == 1) {
        ASSERT_TRUE((*comm)->wait(0, step, soon()));
      }
      // Full slots alternate with runs of small messages, because more small messages can be in flight.
      const bool fills_slot = i % 100 < 20;
      ASSERT_TRUE(fills_slot ? (*comm)->reserve(soon()) : (*comm)->reserve_payload(soon()));
      if (self == 0) std::memcpy((*comm)->payload(), &i, sizeof(i));
      if (self == 0 && fills_slot) std::memcpy((*comm)->slot() + 4000, &i, sizeof(i));
      (*comm)->publish();
      if (self == 0) continue;
      uint32_t in_line, in_slot = i;
      std::memcpy(&in_line, (*comm)->payload(0, step), sizeof(in_line));
      if (fills_slot) std::memcpy(&in_slot, (*comm)->slot(0, step) + 4000, sizeof(in_slot));
      if (in_line != i || in_slot != i) ++wrong;
    }
  };
  std::thread first([&] { rank(0); }), second([&] { rank(1); });
  first.join();
  second.join();
  EXPECT_EQ(wrong, 0);
}

TEST(HostComm, EndsAWaitWithTheErrorOfItsCheck) {
  const auto memory = HostComm::allocate(2);
  std::atomic<bool> died = false;
  std::atomic<bool> asked = false;
  const auto comm = HostComm::attach(*memory, 0, 2, [&](Rank awaited) -> Result<> {
    EXPECT_EQ(awaited, 1);
    asked = true;
    if (!died) return {};
    return fail(ErrorCode::kPeerLost, "rank 1 died", awaited);
  });
  ASSERT_TRUE(comm);
  std::thread killer([&] {
    while (!asked) std::this_thread::yield();
    died = true;
    (*comm)->wake_all();
  });
  (*comm)->open({});
  const uint32_t step = (*comm)->next();
  ASSERT_TRUE((*comm)->reserve(soon()));
  (*comm)->publish();
  const auto result = (*comm)->wait_all(step, soon());
  killer.join();
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, ErrorCode::kPeerLost);
  EXPECT_EQ(result.error().rank, 1);
}

/// A rank that waits for all ranks must really wait, even if it has not read another rank's step for half of the range
/// of step numbers.
TEST(HostComm, FindsLaggingRanksAfterAnyNumberOfSteps) {
  for (const bool has_leader : {false, true}) {
    constexpr int kSize = 3;
    const auto memory = HostCommMemory::allocate(kSize, size_t{32} << 10);
    ASSERT_TRUE(memory);
    std::vector<std::unique_ptr<HostComm>> comms;
    for (Rank rank = 0; rank < kSize; ++rank) {
      comms.push_back(std::move(*HostComm::attach(*memory, rank, kSize, no_check)));
    }
    (*HostCommMemory::map(*memory, kSize))->set_leader(has_leader);
    const auto publish = [&](HostComm& comm) {
      comm.open({1, 2, 3, 4});
      comm.next();
      ASSERT_TRUE(comm.reserve(soon()));
      comm.publish();
    };
    for (int quarter = 0; quarter < 9; ++quarter) {
      for (const auto& comm : comms) publish(*comm);
      for (const auto& comm : comms) ASSERT_TRUE(comm->wait_all(comm->step(), soon())) << quarter;
      for (const auto& comm : comms) HostCommSkip::skip(*comm, uint32_t{1} << 30);
      for (const auto& comm : comms) comm->open({});
      for (const auto& comm : comms) HostCommSkip::skip(*comm, uint32_t{1} << 30);
      for (const Rank early : {0, 1}) {
        publish(*comms[early]);
        const auto waited = comms[early]->wait_all(comms[early]->step(), Deadline::after(Duration::zero()));
        ASSERT_FALSE(waited) << quarter;
        EXPECT_EQ(waited.error().code, ErrorCode::kTimeout) << quarter << ": " << waited.error().to_string();
      }
      publish(*comms[2]);
      for (const auto& comm : comms) ASSERT_TRUE(comm->wait_all(comm->step(), soon())) << quarter;
    }
  }
}

/// A publishing rank checks the count of waiting ranks only once. So a waiting rank must be counted during its whole
/// wait, also while its watch function runs.
TEST(HostComm, CountsARankThatWaitsUntilItsWaitIsOver) {
  const auto memory = HostComm::allocate(2);
  ASSERT_TRUE(memory);
  const auto shared = *HostCommMemory::map(*memory, 2);
  int asked = 0;
  const auto comm = HostComm::attach(*memory, 0, 2, [&](Rank awaited) -> Result<> {
    EXPECT_EQ(shared->rank(awaited).waiters.load(), 1u);
    if (++asked == 3) return fail(ErrorCode::kAborted, "that is enough");
    return {};
  });
  ASSERT_TRUE(comm);
  (*comm)->open({});
  const auto result = (*comm)->wait(1, (*comm)->next(), soon());
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().message, "that is enough");
  EXPECT_EQ(shared->rank(1).waiters.load(), 0u);
}

/// Beside a busy thread, each yield costs a time slice. A collective with many steps must not pay this at every step.
TEST(HostComm, SleepsIfYieldsTakeLong) {
  const auto memory = HostComm::allocate(2);
  constexpr int kSteps = 40;
  constexpr Duration kSlice = 5ms;
  const long before = yields();
  set_yield_time(kSlice);
  const TimePoint begin = steady_clock().now();
  std::mutex mutex;
  std::condition_variable checked;
  int checks = 0;
  const auto rank = [&](Rank self) {
    // Each rank is late until the other one has called its watch function, which happens only when it sleeps.
    const auto comm = HostComm::attach(*memory, self, 2, [&](Rank) -> Result<> {
      const std::lock_guard lock(mutex);
      ++checks;
      checked.notify_all();
      return {};
    });
    ASSERT_TRUE(comm);
    (*comm)->open({1, 2, 3, 4});
    for (int i = 0; i < kSteps; ++i) {
      std::unique_lock lock(mutex);
      const int seen = checks;
      lock.unlock();
      const uint32_t step = (*comm)->next();
      ASSERT_TRUE((*comm)->reserve(soon()));
      lock.lock();
      if (self == 1) checked.wait(lock, [&] { return checks > seen; });
      lock.unlock();
      (*comm)->publish();
      ASSERT_TRUE((*comm)->wait_all(step, soon()));
    }
  };
  std::thread first([&] { rank(0); }), second([&] { rank(1); });
  first.join();
  second.join();
  set_yield_time({});
  // Each rank yields for 20 ms, and then no more than 1/64 of the time.
  const auto most = 2 * (1 + 20ms / kSlice + (steady_clock().now() - begin) / (64 * kSlice));
  EXPECT_GT(yields() - before, 0);
  EXPECT_LE(yields() - before, most);
}

/// Ranks that are each bound to their own core do not share cores, although each of them may use only one.
TEST(HostComm, HasALeaderOnlyIfItsRanksShareCores) {
  const auto has_leader = [](const std::function<int(Rank)>& core_of) {
    constexpr int kSize = 32;
    const auto memory = *HostCommMemory::map(*HostComm::allocate(kSize), kSize);
    for (Rank rank = 0; rank < kSize; ++rank) {
      EXPECT_FALSE(memory->has_leader()) << "not all ranks have attached";
      const int core = core_of(rank);
      memory->rank(rank).usable_cores[core / 64] = uint64_t{1} << core % 64;
      memory->join();
    }
    return memory->has_leader();
  };
  EXPECT_FALSE(has_leader([](Rank rank) { return 50 + rank; }));
  EXPECT_FALSE(has_leader([](Rank rank) { return rank / 2; }));
  EXPECT_TRUE(has_leader([](Rank rank) { return rank / 3; }));
  EXPECT_TRUE(has_leader([](Rank) { return 0; }));
}

void bind_to(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  ASSERT_EQ(sched_setaffinity(0, sizeof(set), &set), 0);
}

/// Two ranks that are each bound to their own core before they join have one core each. If they are bound to the same
/// core later, they share it.
TEST(HostComm, CountsTheCoresOfAllRanks) {
  const cpu_set_t all = usable_core_set();
  if (CPU_COUNT(&all) < 2) GTEST_SKIP() << "takes two cores";
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &all)) cores.push_back(core);
  }
  const auto memory = HostComm::allocate(2);
  std::array<bool, 2> separate{}, together{};
  const auto rank = [&](Rank self) {
    bind_to(cores[self]);
    const auto comm = HostComm::attach(*memory, self, 2, no_check);
    ASSERT_TRUE(comm);
    (*comm)->open({1, 2, 3, 4});
    // The ranks are late in turn, so that the other rank's spin ends without success.
    const auto go = [&](int steps) {
      for (int i = 0; i < steps; ++i) {
        const uint32_t step = (*comm)->next();
        ASSERT_TRUE((*comm)->reserve(soon()));
        if (i % 2 == self) {
          for (const TimePoint begin = steady_clock().now(); steady_clock().now() - begin < 1ms;) {
          }
        }
        (*comm)->publish();
        ASSERT_TRUE((*comm)->wait_all(step, soon()));
      }
    };
    go(20);
    separate[self] = (*comm)->has_own_cores();
    bind_to(cores[0]);
    go(400);
    together[self] = !(*comm)->has_own_cores();
  };
  std::thread first([&] { rank(0); }), second([&] { rank(1); });
  first.join();
  second.join();
  EXPECT_TRUE(separate[0] && separate[1]);
  EXPECT_TRUE(together[0] && together[1]);
}

}  // namespace
}  // namespace test
}  // namespace muster
