#include "muster/io/loop_driver.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <latch>
#include <set>

namespace muster {
namespace {

constexpr Duration kTimeout = std::chrono::seconds(60);

class LoopDriverTest : public testing::Test, private LoopDriver::Delegate {
 protected:
  void TearDown() override {
    stop();
    for (LoopDriver* driver : {&briefly_driven_, &slowly_helped_, &rarely_helped_}) {
      auto lock = driver->lock();
      (void)driver->stop(lock);
    }
  }
  void stop() {
    auto lock = driver_.lock();
    (void)driver_.stop(lock);
  }

  /// Adds a task that waits for `gate`.
  void add_task(std::latch& started, std::latch& gate) {
    const auto lock = driver_.lock();
    driver_.add_task([&] {
      started.count_down();
      gate.wait();
    });
  }

  bool work_ = false;
  int expired_ = 0;
  TimePoint deadline_{INT64_MAX};
  LoopDriver driver_{Loop::create().value(), *this, {.grace = 1ms, .max_tasks = 2}};
  LoopDriver briefly_driven_{Loop::create().value(), *this, {.grace = 1ms, .max_tasks = 2, .max_drive = 1ms}};
  LoopDriver slowly_helped_{Loop::create().value(), *this, {.grace = 250ms, .max_tasks = 2}};
  LoopDriver rarely_helped_{Loop::create().value(), *this, {.grace = 2s, .max_tasks = 2}};

 private:
  bool has_work() const override { return work_; }
  void expire() override { expired_ += steady_clock().now() >= deadline_ ? 1 : 0; }
  TimePoint next_deadline() const override { return deadline_; }
};

TEST_F(LoopDriverTest, AWaitingThreadDrivesTheLoop) {
  std::thread::id driver;
  auto lock = driver_.lock();
  driver_.loop().after(Duration::zero(), [&] { driver = std::this_thread::get_id(); });
  driver_.wait_until(
      lock, [&] { return driver != std::thread::id(); }, Deadline::after(kTimeout));
  EXPECT_EQ(driver, std::this_thread::get_id());
}

TEST_F(LoopDriverTest, ItsOwnThreadDrivesTheLoopWhileThereIsWork) {
  std::promise<std::thread::id> driver;
  {
    const auto lock = driver_.lock();
    work_ = true;
    driver_.loop().after(Duration::zero(), [&] {
      work_ = false;
      driver.set_value(std::this_thread::get_id());
    });
    driver_.provide_progress();
  }
  EXPECT_NE(driver.get_future().get(), std::this_thread::get_id());
}

TEST_F(LoopDriverTest, AfterALongWaitOwnThreadsDriveTheLoop) {
  std::thread::id driver, runner;
  auto lock = briefly_driven_.lock();
  work_ = true;
  const auto second_task = [&] {
    const auto inner = briefly_driven_.lock();
    runner = std::this_thread::get_id();
    briefly_driven_.notify();
  };
  const auto first_task = [&] {
    const auto inner = briefly_driven_.lock();
    briefly_driven_.loop().after(10ms, [&] {
      driver = std::this_thread::get_id();
      briefly_driven_.add_task(second_task);
    });
  };
  briefly_driven_.loop().after(100ms, [&] { briefly_driven_.add_task(first_task); });
  briefly_driven_.wait_until(
      lock, [&] { return runner != std::thread::id(); }, Deadline::after(kTimeout));
  EXPECT_NE(driver, std::this_thread::get_id());
  EXPECT_EQ(driver, runner);  // without a hand-over
}

TEST_F(LoopDriverTest, ALongWaitLeavesTheLoopToAnotherThreadThatWaits) {
  std::atomic<bool> begun = false;
  bool ended = false;
  std::thread long_wait([&] {
    auto lock = briefly_driven_.lock();
    briefly_driven_.wait_until(
        lock,
        [&] {
          begun = true;
          return ended;
        },
        Deadline::after(kTimeout));
  });
  while (!begun) std::this_thread::yield();
  std::thread::id driver;
  auto lock = briefly_driven_.lock();
  work_ = true;
  briefly_driven_.loop().after(50ms, [] {});  // ends the first sleep of the thread that drives
  briefly_driven_.loop().after(300ms, [&] { driver = std::this_thread::get_id(); });
  briefly_driven_.wait_until(
      lock, [&] { return driver != std::thread::id(); }, Deadline::after(kTimeout));
  EXPECT_EQ(driver, std::this_thread::get_id());
  ended = true;
  briefly_driven_.notify();
  lock.unlock();
  long_wait.join();
}

/// Notes the thread that runs it in `threads`.
class SerialTask final : public LoopDriver::Task {
 public:
  SerialTask(LoopDriver& driver, std::vector<std::thread::id>& threads) : driver_(driver), threads_(threads) {}
  void run() override {
    std::this_thread::sleep_for(40ms);  // tidy: allow(sleep) a task that takes long
    const auto lock = driver_.lock();
    threads_.push_back(std::this_thread::get_id());
    driver_.notify();
  }
  bool is_serial() const override { return true; }

 private:
  LoopDriver& driver_;
  std::vector<std::thread::id>& threads_;
};

TEST_F(LoopDriverTest, OneThreadRunsSerialTasksWhileItMakesProgress) {
  constexpr size_t kTasks = 15;
  std::vector<std::thread::id> threads;
  auto lock = slowly_helped_.lock();
  for (size_t i = 0; i < kTasks; ++i) {
    slowly_helped_.add_task(std::shared_ptr<LoopDriver::Task>(std::make_shared<SerialTask>(slowly_helped_, threads)));
  }
  slowly_helped_.wait_until(
      lock, [&] { return threads.size() == kTasks; }, Deadline::after(kTimeout));
  EXPECT_EQ(std::set(threads.begin(), threads.end()).size(), 1);
}

TEST_F(LoopDriverTest, AWaitEndsAtItsDeadline) {
  auto lock = driver_.lock();
  driver_.wait_until(
      lock, [] { return false; }, Deadline::after(std::chrono::milliseconds(1)));
  EXPECT_TRUE(lock.owns_lock());
}

TEST_F(LoopDriverTest, ASleepEndsAtTheNextDeadline) {
  auto lock = driver_.lock();
  deadline_ = steady_clock().now() + std::chrono::milliseconds(1);
  driver_.wait_until(
      lock, [&] { return expired_ > 0; }, Deadline::after(kTimeout));
  EXPECT_GT(expired_, 0);
}

TEST_F(LoopDriverTest, RunsCallbacksInOrderAndWithoutTheLock) {
  std::vector<int> order;
  auto lock = driver_.lock();
  const auto callback = [&](int number) {
    return [&, number] {
      const auto inner = driver_.lock();  // would deadlock with the lock held
      order.push_back(number);
    };
  };
  driver_.add_callback(callback(2));
  driver_.add_callback(callback(3));
  driver_.add_first_callback(callback(1));
  driver_.run_callbacks(lock);
  EXPECT_EQ(order, (std::vector{1, 2, 3}));
}

TEST_F(LoopDriverTest, SeveralThreadsMayWait) {
  std::atomic<int> ended = 0;
  bool done = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      auto lock = driver_.lock();
      driver_.wait_until(
          lock, [&] { return done; }, Deadline::after(kTimeout));
      ++ended;
    });
  }
  {
    const auto lock = driver_.lock();
    done = true;
    driver_.notify();
    driver_.wake();
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ended, 4);
}

TEST_F(LoopDriverTest, OnlyOwnThreadsRunTasks) {
  std::promise<bool> own;
  auto lock = driver_.lock();
  driver_.add_task([&] {
    own.set_value(driver_.on_own_thread());
    const auto inner = driver_.lock();
    driver_.notify();
  });
  const auto ran = own.get_future();
  // This thread drives the loop and waits, and must leave the task to another one.
  driver_.wait_until(
      lock, [&] { return ran.wait_for(std::chrono::seconds(0)) == std::future_status::ready; },
      Deadline::after(kTimeout));
  EXPECT_EQ(ran.wait_for(std::chrono::seconds(0)), std::future_status::ready);
  EXPECT_FALSE(driver_.on_own_thread());
}

TEST_F(LoopDriverTest, ATaskThatBlocksStopsNeitherTheLoopNorOtherTasks) {
  work_ = true;
  std::latch first_started(1), second_started(1), gate(1), timer(1);
  add_task(first_started, gate);
  first_started.wait();
  {
    const auto lock = driver_.lock();
    driver_.loop().after(Duration::zero(), [&] { timer.count_down(); });
    driver_.provide_progress();
  }
  timer.wait();
  add_task(second_started, gate);
  second_started.wait();
  gate.count_down();
  stop();  // before the latches are destroyed
}

TEST_F(LoopDriverTest, RunsAtMostMaxTasksAtATime) {
  std::latch started(2), gate(1);
  std::atomic<bool> third = false;
  add_task(started, gate);
  add_task(started, gate);
  started.wait();
  {
    const auto lock = driver_.lock();
    driver_.add_task([&] { third = true; });
  }
  auto lock = driver_.lock();
  driver_.wait_until(
      lock, [] { return false; }, Deadline::after(std::chrono::milliseconds(20)));
  EXPECT_FALSE(third);
  lock.unlock();
  gate.count_down();
  stop();
}

TEST_F(LoopDriverTest, TasksThatWaitOrBlockDoNotCount) {
  std::latch started(2), gate(1);
  std::atomic<bool> over = false;
  {
    const auto lock = driver_.lock();
    driver_.add_task([&] {
      auto inner = driver_.lock();
      started.count_down();
      driver_.wait_until(
          inner, [&] { return over.load(); }, Deadline::after(kTimeout));
    });
    driver_.add_task([&] {
      const LoopDriver::BlockedTask blocked(driver_);
      started.count_down();
      gate.wait();
    });
  }
  started.wait();
  std::latch more_started(2), more_gate(1);
  add_task(more_started, more_gate);
  add_task(more_started, more_gate);
  more_started.wait();
  more_gate.count_down();
  over = true;
  gate.count_down();
  {
    const auto lock = driver_.lock();
    driver_.notify();
  }
  stop();
}

TEST_F(LoopDriverTest, StopDropsTasksThatHaveNotStarted) {
  std::latch started(2), gate(1);
  std::atomic<bool> third = false;
  add_task(started, gate);
  add_task(started, gate);
  started.wait();
  auto lock = driver_.lock();
  driver_.add_task([&] { third = true; });
  gate.count_down();
  EXPECT_TRUE(driver_.stop(lock));
  EXPECT_FALSE(third);
}

/// A callback that takes long must not stop the loop.
TEST_F(LoopDriverTest, TheLoopIsDrivenWhileAnOwnThreadRunsACallback) {
  std::latch started(1), gate(1), timer(1);
  {
    const auto lock = driver_.lock();
    work_ = true;
    driver_.loop().after(Duration::zero(), [&] {
      driver_.add_callback([&] {
        started.count_down();
        gate.wait();
      });
    });
    driver_.provide_progress();
  }
  started.wait();
  {
    const auto lock = driver_.lock();
    driver_.loop().after(Duration::zero(), [&] { timer.count_down(); });
  }
  timer.wait();
  gate.count_down();
  stop();
}

/// Waking another thread for it would cost more than a short task.
TEST_F(LoopDriverTest, AnOwnThreadRunsTheTaskOfItsCallback) {
  std::promise<std::thread::id> runner;
  std::future<std::thread::id> ran = runner.get_future();
  std::thread::id caller;
  {
    const auto lock = rarely_helped_.lock();
    work_ = true;
    rarely_helped_.loop().after(Duration::zero(), [&] {
      rarely_helped_.add_callback([&] {
        caller = std::this_thread::get_id();
        {
          const auto inner = rarely_helped_.lock();
          rarely_helped_.add_task([&] { runner.set_value(std::this_thread::get_id()); });
        }
        (void)ran.wait_for(20ms);  // time for another thread to run it
      });
    });
    rarely_helped_.provide_progress();
  }
  EXPECT_EQ(ran.get(), caller);
}

TEST_F(LoopDriverTest, ACallbackThatTakesLongDoesNotHoldUpItsTask) {
  std::latch ran(1), returned(1);
  {
    const auto lock = driver_.lock();
    work_ = true;
    driver_.loop().after(Duration::zero(), [&] {
      driver_.add_callback([&] {
        {
          const auto inner = driver_.lock();
          driver_.add_task([&] { ran.count_down(); });
        }
        ran.wait();
        returned.count_down();
      });
    });
    driver_.provide_progress();
  }
  returned.wait();
  stop();
}

TEST_F(LoopDriverTest, TheLoopIsDrivenWhileAWaitingThreadRunsACallback) {
  std::latch timer(1);
  auto lock = driver_.lock();
  work_ = true;
  bool called = false;
  driver_.loop().after(Duration::zero(), [&] {
    driver_.add_callback([&] {
      {
        const auto inner = driver_.lock();
        driver_.loop().after(Duration::zero(), [&] { timer.count_down(); });
      }
      timer.wait();
      called = true;
    });
  });
  driver_.wait_until(
      lock, [&] { return called; }, Deadline::after(kTimeout));
  EXPECT_TRUE(called);
}

TEST_F(LoopDriverTest, StopHasADeadline) {
  std::latch started(1), gate(1);
  add_task(started, gate);
  started.wait();
  auto lock = driver_.lock();
  EXPECT_FALSE(driver_.stop(lock, Deadline::after(std::chrono::milliseconds(10))));
  gate.count_down();
  EXPECT_TRUE(driver_.stop(lock));
}

TEST_F(LoopDriverTest, KnowsItsCallbacks) {
  bool inside = false;
  auto lock = driver_.lock();
  driver_.add_callback([&] { inside = driver_.is_inside(); });
  driver_.run_callbacks(lock);
  EXPECT_TRUE(inside);
  EXPECT_FALSE(driver_.is_inside());
}

TEST_F(LoopDriverTest, StopsOnce) {
  auto lock = driver_.lock();
  EXPECT_TRUE(driver_.stop(lock));
  EXPECT_FALSE(driver_.stop(lock));
}

}  // namespace
}  // namespace muster
