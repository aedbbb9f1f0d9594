#include "muster/io/loop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "io/io_testing.h"
#include "io/yields.h"

namespace muster {
namespace {

using testing::ElementsAre;

void write_byte(const Fd& fd) { ASSERT_EQ(write(fd.get(), "x", 1), 1); }

TEST(LoopTimers, FireInTheOrderOfTheirTimesThenOfCreation) {
  const auto loop = make_loop();
  const TimePoint now = loop->clock().now();
  std::vector<int> order;
  loop->at(now + 3ms, [&] { order.push_back(4); });
  loop->at(now + 1ms, [&] { order.push_back(2); });
  loop->at(now + 2ms, [&] { order.push_back(3); });
  loop->at(now, [&] { order.push_back(0); });
  loop->at(now, [&] { order.push_back(1); });
  ASSERT_TRUE(loop->run_until([&] { return order.size() == 5; }, soon()));
  EXPECT_THAT(order, ElementsAre(0, 1, 2, 3, 4));
}

TEST(LoopTimers, NeverFireEarly) {
  const auto loop = make_loop();
  const TimePoint due = loop->clock().now() + 20ms;
  std::optional<TimePoint> fired;
  loop->at(due, [&] { fired = loop->clock().now(); });
  ASSERT_TRUE(loop->run_until([&] { return fired.has_value(); }, soon()));
  EXPECT_GE(*fired, due);
}

TEST(LoopTimers, CancelOneAnotherInTheSameTurn) {
  const auto loop = make_loop();
  int fired = 0;
  Loop::TimerId second = 0;
  loop->after(Duration::zero(), [&] {
    ++fired;
    loop->cancel(second);
  });
  second = loop->after(Duration::zero(), [&] { ++fired; });
  loop->poll();
  loop->poll();
  EXPECT_EQ(fired, 1);
  loop->cancel(second);  // a second cancel, and a cancel of a timer that is gone, have no effect
}

TEST(LoopTimers, CannotBlockTheLoopByRearming) {
  const auto loop = make_loop();
  const SocketPair pair;
  bool read_event = false;
  std::function<void()> again = [&] { loop->after(Duration::zero(), again); };
  again();
  ASSERT_TRUE(loop->watch(pair.one.get(), EPOLLIN, [&](uint32_t) { read_event = true; }));
  write_byte(pair.two);
  ASSERT_TRUE(loop->run_until([&] { return read_event; }, soon()));
}

TEST(LoopPost, RunsTasksOfManyThreadsEachInItsOrder) {
  const auto loop = make_loop();
  constexpr int kThreads = 4, kTasks = 2000;
  std::vector<std::vector<int>> seen(kThreads);
  int ran = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kTasks; ++i) {
        loop->post([&, t, i] {
          seen[t].push_back(i);
          ++ran;
        });
      }
    });
  }
  EXPECT_TRUE(loop->run_until([&] { return ran == kThreads * kTasks; }, soon()));
  for (auto& thread : threads) thread.join();
  for (const auto& order : seen) {
    ASSERT_EQ(order.size(), static_cast<size_t>(kTasks));
    EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  }
}

TEST(LoopPost, WakesALoopThatSleeps) {
  const auto loop = make_loop();
  for (int i = 0; i < 50; ++i) {
    bool ran = false;
    std::thread poster([&] { loop->post([&] { ran = true; }); });
    EXPECT_TRUE(loop->run_until([&] { return ran; }, soon()));
    poster.join();
  }
}

TEST(LoopWake, EndsAWaitOnAnotherThread) {
  const auto loop = make_loop();
  std::atomic<bool> stop{false};
  std::thread waker([&] {
    stop.store(true);
    loop->wake();
  });
  EXPECT_TRUE(loop->run_until([&] { return stop.load(); }, soon()));
  waker.join();
}

TEST(LoopWatch, ReportsReadinessUntilItIsRemoved) {
  const auto loop = make_loop();
  const SocketPair pair;
  int events = 0;
  ASSERT_TRUE(loop->watch(pair.one.get(), EPOLLIN, [&](uint32_t reported) {
    EXPECT_EQ(reported, static_cast<uint32_t>(EPOLLIN));
    ++events;
  }));
  EXPECT_FALSE(loop->poll());
  write_byte(pair.two);
  EXPECT_TRUE(loop->run_once(soon()));
  EXPECT_TRUE(loop->run_once(soon()));  // level-triggered
  EXPECT_EQ(events, 2);
  ASSERT_TRUE(loop->modify(pair.one.get(), 0));
  EXPECT_FALSE(loop->poll());
  loop->unwatch(pair.one.get());
  EXPECT_FALSE(loop->poll());
}

TEST(LoopWatch, RefusesASecondWatchAndAClosedDescriptor) {
  const auto loop = make_loop();
  SocketPair pair;
  ASSERT_TRUE(loop->watch(pair.one.get(), EPOLLIN, [](uint32_t) {}));
  EXPECT_EQ(loop->watch(pair.one.get(), EPOLLIN, [](uint32_t) {}).error().code, ErrorCode::kAlreadyExists);
  EXPECT_EQ(loop->modify(pair.two.get(), EPOLLIN).error().code, ErrorCode::kNotFound);
  EXPECT_EQ(loop->watch(-1, EPOLLIN, [](uint32_t) {}).error().code, ErrorCode::kIo);
  loop->unwatch(pair.two.get());  // has no effect, because it is not watched
}

TEST(LoopWatch, MayEndInItsOwnHandler) {
  const auto loop = make_loop();
  const SocketPair pair;
  const auto token = std::make_shared<int>(42);
  int seen = 0;
  ASSERT_TRUE(loop->watch(pair.one.get(), EPOLLIN, [&, token](uint32_t) {
    loop->unwatch(pair.one.get());
    seen += *token;  // the handler must live until it returns
  }));
  write_byte(pair.two);
  ASSERT_TRUE(loop->run_once(soon()));
  EXPECT_FALSE(loop->poll());
  EXPECT_EQ(seen, 42);
  EXPECT_EQ(token.use_count(), 1);
}

// Both descriptors are ready in one turn. The handler that runs first closes the other descriptor and watches a new
// socket that gets the same number. The event that was already fetched for the old descriptor must not reach the new
// watch.
TEST(LoopWatch, NeverGetsTheEventOfAnEarlierWatchOnTheSameNumber) {
  const auto loop = make_loop();
  SocketPair a, b, quiet;
  int stale = 0;
  bool replaced = false;
  const auto replace = [&](Fd& other) {
    if (replaced) return;
    replaced = true;
    const int number = other.get();
    loop->unwatch(number);
    ASSERT_EQ(dup2(quiet.one.get(), number), number);
    ASSERT_TRUE(loop->watch(number, EPOLLIN, [&](uint32_t) { ++stale; }));
  };
  ASSERT_TRUE(loop->watch(a.one.get(), EPOLLIN, [&](uint32_t) { replace(b.one); }));
  ASSERT_TRUE(loop->watch(b.one.get(), EPOLLIN, [&](uint32_t) { replace(a.one); }));
  write_byte(a.two);
  write_byte(b.two);
  ASSERT_TRUE(loop->run_once(soon()));
  EXPECT_TRUE(replaced);
  EXPECT_EQ(stale, 0);
  write_byte(quiet.two);
  ASSERT_TRUE(loop->run_until([&] { return stale > 0; }, soon()));  // the new watch works
}

TEST(LoopWatch, LosesEventsThatWereSwitchedOffInTheSameTurn) {
  const auto loop = make_loop();
  const SocketPair a, b;
  int calls = 0;
  ASSERT_TRUE(loop->watch(a.one.get(), EPOLLIN, [&](uint32_t) {
    ++calls;
    ASSERT_TRUE(loop->modify(b.one.get(), 0));
  }));
  ASSERT_TRUE(loop->watch(b.one.get(), EPOLLIN, [&](uint32_t) {
    ++calls;
    ASSERT_TRUE(loop->modify(a.one.get(), 0));
  }));
  write_byte(a.two);
  write_byte(b.two);
  ASSERT_TRUE(loop->run_once(soon()));
  EXPECT_EQ(calls, 1);
}

TEST(LoopPoller, IsCalledEveryTurnAndMayRemoveItself) {
  const auto loop = make_loop();
  int asked = 0;
  Loop::PollerId id = 0;
  id = loop->add_poller([&] {
    if (++asked == 3) loop->remove_poller(id);
    return asked == 3;
  });
  EXPECT_TRUE(loop->run_once(soon()));  // polls until the poller reports progress
  EXPECT_EQ(asked, 3);
  EXPECT_FALSE(loop->poll());
  EXPECT_EQ(asked, 3);
}

TEST(LoopPoller, YieldsItsCoreWhileIdle) {
  const auto loop = make_loop();
  int asked = 0;
  loop->add_poller([&] { return ++asked == 100; });
  const long before = test::yields();
  EXPECT_TRUE(loop->run_once(soon()));
  EXPECT_EQ(asked, 100);
  EXPECT_GT(test::yields() - before, 0);  // the number is smaller if other threads need the core: see YieldBudget
}

TEST(LoopRun, TimesOutAtTheDeadlineAndNotBefore) {
  const auto loop = make_loop();
  const Deadline deadline = Deadline::after(20ms);
  const auto result = loop->run_until([] { return false; }, deadline);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, ErrorCode::kTimeout);
  EXPECT_TRUE(deadline.passed());
  EXPECT_FALSE(loop->run_once(deadline));  // the deadline has passed, so it does not wait
  EXPECT_TRUE(loop->run_until([] { return true; }, deadline));
}

}  // namespace
}  // namespace muster
