// Threads that wait drive a loop in which an own thread of the driver sleeps.
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <memory>
#include <thread>

#include "muster/io/loop_driver.h"

namespace muster {
namespace {

constexpr Duration kTestTime = std::chrono::seconds(60);

/// An own thread sleeps in the loop when a test begins.
class LoopDriverSleepTest : public testing::Test, private LoopDriver::Delegate {
 protected:
  void SetUp() override {
    auto lock = driver_.lock();
    driver_.provide_progress();
    lock.unlock();
    std::this_thread::sleep_for(20ms);  // tidy: allow(sleep) a sleep in the loop has no event
  }
  void TearDown() override {
    auto lock = driver_.lock();
    (void)driver_.stop(lock);
  }
  /// In this thread.
  void drive(Duration time) {
    auto lock = driver_.lock();
    driver_.wait_until(
        lock, [] { return false; }, Deadline::after(time));
  }

  LoopDriver driver_{Loop::create().value(), *this, {.grace = 1ms, .max_tasks = 2}};

 private:
  bool has_work() const override { return true; }
  void expire() override {}
  TimePoint next_deadline() const override { return TimePoint{INT64_MAX}; }
};

TEST_F(LoopDriverSleepTest, TheThreadThatSleepsInTheLoopGetsItBack) {
  for (int i = 0; i < 100; ++i) drive(10us);
  drive(1ms);
  std::promise<std::thread::id> driver;
  const Fd event(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  {
    const auto lock = driver_.lock();
    ASSERT_TRUE(driver_.loop().watch(event.get(), EPOLLIN, [&](uint32_t) {
      driver_.loop().unwatch(event.get());
      driver.set_value(std::this_thread::get_id());
    }));
  }
  const uint64_t one = 1;
  ASSERT_EQ(write(event.get(), &one, sizeof one), sizeof one);
  EXPECT_NE(driver.get_future().get(), std::this_thread::get_id());
}

TEST_F(LoopDriverSleepTest, PollersRestWhenItGetsTheLoopBack) {
  bool rested = false;
  {
    const auto lock = driver_.lock();
    const auto poller = std::make_shared<Loop::PollerId>();
    *poller = driver_.loop().add_poller([] { return false; },
                                        [&, poller] {
                                          rested = true;
                                          driver_.loop().remove_poller(*poller);
                                        });
  }
  drive(1ms);
  const auto lock = driver_.lock();
  EXPECT_TRUE(rested);
}

TEST_F(LoopDriverSleepTest, APollerThatRestsMayAddATask) {
  std::promise<void> ran;
  {
    const auto lock = driver_.lock();
    const auto poller = std::make_shared<Loop::PollerId>();
    *poller = driver_.loop().add_poller([] { return false; },
                                        [&, poller] {
                                          driver_.loop().remove_poller(*poller);
                                          driver_.add_task([&] { ran.set_value(); });
                                        });
  }
  drive(1ms);
  ran.get_future().wait();
}

TEST_F(LoopDriverSleepTest, ItPollsForPollersThatCannotRest) {
  std::promise<std::thread::id> driver;
  const std::thread::id here = std::this_thread::get_id();
  auto id = std::make_shared<Loop::PollerId>();
  {
    const auto lock = driver_.lock();
    *id = driver_.loop().add_poller([&, id] {
      if (std::this_thread::get_id() == here) return false;
      driver_.loop().remove_poller(*id);
      driver.set_value(std::this_thread::get_id());
      return true;
    });
  }
  drive(1ms);
  EXPECT_NE(driver.get_future().get(), here);
}

TEST_F(LoopDriverSleepTest, ItRunsTasksAlsoWhileTheLoopIsDrivenElsewhere) {
  std::promise<void> driven, ran;
  std::thread other([&] {
    auto lock = driver_.lock();
    const auto future = ran.get_future();
    const auto has_run = [&] { return future.wait_for(Duration::zero()) == std::future_status::ready; };
    driver_.wait_until(lock, has_run, Deadline::after(kTestTime), [&] { driven.set_value(); });
    EXPECT_TRUE(has_run());
  });
  driven.get_future().wait();
  {
    const auto lock = driver_.lock();
    driver_.add_task([&] {
      ran.set_value();
      const auto inner = driver_.lock();
      driver_.notify();
    });
  }
  other.join();
}

TEST_F(LoopDriverSleepTest, ADeadlineOfACallThatFollowsIsKept) {
  drive(1ms);
  std::promise<void> fired;
  {
    const auto lock = driver_.lock();
    driver_.loop().after(1ms, [&] { fired.set_value(); });
    driver_.provide_progress();
  }
  fired.get_future().wait();
}

TEST_F(LoopDriverSleepTest, StopEndsIt) {
  std::thread other([&] { drive(50ms); });
  auto lock = driver_.lock();
  EXPECT_TRUE(driver_.stop(lock, Deadline::after(kTestTime)));
  lock.unlock();
  other.join();
}

TEST_F(LoopDriverSleepTest, AWaitBeginsOnce) {
  for (const bool elsewhere : {false, true}) {
    std::atomic<bool> driving = false, ended = false;
    std::thread other;
    if (elsewhere) {
      other = std::thread([&] {
        auto lock = driver_.lock();
        driver_.wait_until(
            lock, [&] { return ended.load(); }, Deadline::after(kTestTime), [&] { driving = true; });
      });
      while (!driving) std::this_thread::yield();
    }
    int begun = 0;
    auto lock = driver_.lock();
    driver_.loop().after(10ms, [&] { ended = true; });
    driver_.wait_until(
        lock, [&] { return ended.load(); }, Deadline::after(kTestTime), [&] { ++begun; });
    EXPECT_EQ(begun, 1);
    lock.unlock();
    if (other.joinable()) other.join();
  }
}

}  // namespace
}  // namespace muster
