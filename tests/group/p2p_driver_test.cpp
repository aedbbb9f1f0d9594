#include "muster/group/p2p/p2p_driver.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>

namespace muster {
namespace {

constexpr Duration kTimeout = std::chrono::seconds(60);

class P2pDriverTest : public testing::Test, private P2pDriver::Client {
 protected:
  void TearDown() override { stop(); }
  void stop() {
    auto lock = driver_.lock();
    (void)driver_.stop(lock);
  }

  bool work_ = false;
  int expired_ = 0;
  TimePoint deadline_{INT64_MAX};
  P2pDriver driver_{Loop::create().value(), *this};

 private:
  bool has_work() const override { return work_; }
  void expire() override { expired_ += steady_clock().now() >= deadline_ ? 1 : 0; }
  TimePoint next_deadline() const override { return deadline_; }
};

TEST_F(P2pDriverTest, AWaitingThreadDrivesTheLoop) {
  std::thread::id driver;
  auto lock = driver_.lock();
  driver_.loop().after(Duration::zero(), [&] { driver = std::this_thread::get_id(); });
  driver_.wait_until(
      lock, [&] { return driver != std::thread::id(); }, Deadline::after(kTimeout));
  EXPECT_EQ(driver, std::this_thread::get_id());
}

TEST_F(P2pDriverTest, ItsOwnThreadDrivesTheLoopWhileThereIsWork) {
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

TEST_F(P2pDriverTest, AWaitEndsAtItsDeadline) {
  auto lock = driver_.lock();
  driver_.wait_until(
      lock, [] { return false; }, Deadline::after(std::chrono::milliseconds(1)));
  EXPECT_TRUE(lock.owns_lock());
}

TEST_F(P2pDriverTest, ASleepEndsAtTheNextDeadline) {
  auto lock = driver_.lock();
  deadline_ = steady_clock().now() + std::chrono::milliseconds(1);
  driver_.wait_until(
      lock, [&] { return expired_ > 0; }, Deadline::after(kTimeout));
  EXPECT_GT(expired_, 0);
}

TEST_F(P2pDriverTest, RunsCallbacksInOrderAndWithoutTheLock) {
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

TEST_F(P2pDriverTest, SeveralThreadsMayWait) {
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

TEST_F(P2pDriverTest, StopsOnce) {
  auto lock = driver_.lock();
  EXPECT_TRUE(driver_.stop(lock));
  EXPECT_FALSE(driver_.stop(lock));
}

}  // namespace
}  // namespace muster
