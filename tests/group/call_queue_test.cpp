#include "muster/group/queue/call_queue.h"

#include <gtest/gtest.h>

#include <future>

namespace muster {
namespace {

Deadline test_deadline() { return Deadline::after(std::chrono::seconds(60)); }

Operation barrier() {
  Operation operation;
  operation.call.collective = Collective::kBarrier;
  return operation;
}

/// An executor whose operations end when the test says so, and with the result that the test sets.
class CallQueueTest : public testing::Test, private CallQueue::Executor {
 protected:
  Work submit(bool async) { return queue_->submit(barrier(), std::chrono::seconds(60), async); }
  /// Submits an operation and returns once it runs. The operation ends after release_.set_value().
  Work submit_blocked() {
    blocked_ = true;
    Work work = submit(true);
    started_.get_future().wait();
    return work;
  }
  void TearDown() override {
    if (blocked_) release_.set_value();
    queue_.reset();  // joins the progress threads, which call this object
  }
  void unblock() {
    release_.set_value();
    blocked_ = false;
  }

  std::vector<uint64_t> ran_;
  std::vector<std::thread::id> threads_;
  std::optional<Error> failure_, shut_down_;
  int callbacks_ = 0;
  std::promise<void> started_, release_;
  std::atomic<bool> blocked_ = false;
  std::unique_ptr<CallQueue> queue_ =
      std::make_unique<CallQueue>(static_cast<CallQueue::Executor&>(*this), nullptr, "test");

 private:
  Result<> run(const Operation& operation, Duration) override {
    ran_.push_back(operation.call.sequence);
    threads_.push_back(std::this_thread::get_id());
    if (blocked_ && ran_.size() == 1) {
      started_.set_value();
      release_.get_future().wait();
    }
    return failure_ ? tl::unexpected(*failure_) : Result<>{};
  }
  void shut_down(const Error& why) override { shut_down_ = why; }
  void run_callbacks() override { ++callbacks_; }
};

TEST_F(CallQueueTest, RunsASyncCallInTheCallersThread) {
  EXPECT_TRUE(submit(false).result());
  EXPECT_EQ(threads_, std::vector{std::this_thread::get_id()});
  EXPECT_EQ(queue_->sequence(), 1);
}

TEST_F(CallQueueTest, RunsAnAsyncCallInAnotherThread) {
  EXPECT_TRUE(submit(true).wait(Deadline::after(std::chrono::seconds(30)))) << "a deadline before that of the call";
  ASSERT_EQ(threads_.size(), 1);
  EXPECT_NE(threads_[0], std::this_thread::get_id());
}

TEST_F(CallQueueTest, AWaitRunsTheNextCall) {
  bool ran_here = false;
  for (int i = 0; i < 10'000 && !ran_here; ++i) {  // unless the progress thread is faster
    std::atomic<bool> called = false;
    const Work work = submit(true);
    work.on_done([&](const Result<>&) { called = true; });
    EXPECT_TRUE(work.wait());
    ran_here = threads_.back() == std::this_thread::get_id();
    if (ran_here) {
      EXPECT_TRUE(called);
    } else {
      EXPECT_TRUE(queue_->wait_for_pending(test_deadline()));
      while (!called) std::this_thread::yield();
    }
  }
  EXPECT_TRUE(ran_here);
}

TEST_F(CallQueueTest, AWaitMayOutliveTheQueue) {
  std::vector<std::future<void>> waits;
  for (int i = 0; i < 100; ++i) {
    waits.push_back(std::async(std::launch::async, [work = submit(true)] { EXPECT_TRUE(work.wait()); }));
  }
  queue_.reset();
  for (std::future<void>& wait : waits) wait.get();
  EXPECT_EQ(ran_.size(), 100);
}

TEST_F(CallQueueTest, RunsQueuedCallsInOrder) {
  std::vector<Work> works{submit_blocked()};
  for (int i = 0; i < 10; ++i) works.push_back(submit(true));
  unblock();
  EXPECT_TRUE(submit(false).result());  // queued after the other calls
  for (const Work& work : works) EXPECT_TRUE(work.wait(test_deadline()));
  const std::vector<uint64_t> expected{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  EXPECT_EQ(ran_, expected);
}

TEST_F(CallQueueTest, KeepsTheFirstError) {
  failure_ = Error{ErrorCode::kTimeout, "first", 1, {}};
  EXPECT_FALSE(submit(false).result());
  failure_->message = "second";
  EXPECT_FALSE(submit(true).wait());
  EXPECT_TRUE(queue_->wait_for_pending(test_deadline()));
  EXPECT_EQ(queue_->first_error()->message, "first");
  queue_.reset();  // joins the progress thread
  EXPECT_EQ(callbacks_, 2);
}

TEST_F(CallQueueTest, ClosesAfterTheCurrentCall) {
  const Work work = submit_blocked();
  queue_->close(Error{ErrorCode::kAborted, "enough", kNoRank, {}});
  EXPECT_FALSE(shut_down_) << "while a call runs";
  unblock();
  EXPECT_TRUE(work.wait(test_deadline()));
  EXPECT_TRUE(queue_->wait_for_pending(test_deadline()));
  ASSERT_TRUE(shut_down_);
  EXPECT_EQ(shut_down_->message, "enough");
}

TEST_F(CallQueueTest, ClosesAtOnceWhenIdle) {
  queue_->close(Error{ErrorCode::kAborted, "enough", kNoRank, {}});
  ASSERT_TRUE(shut_down_);
  EXPECT_EQ(shut_down_->message, "enough");
}

TEST_F(CallQueueTest, WaitForPendingEndsAtItsDeadline) {
  const Work work = submit_blocked();
  const auto waited = queue_->wait_for_pending(Deadline::after(std::chrono::milliseconds(1)));
  ASSERT_FALSE(waited);
  EXPECT_EQ(waited.error().code, ErrorCode::kTimeout);
  EXPECT_EQ(waited.error().message, "1 of the 1 operations begun in group \"test\" are still pending");
}

TEST_F(CallQueueTest, RefusesCallsBeyondItsLimit) {
  const Work work = submit_blocked();
  Work last{Result<>{}};
  int accepted = 0;
  do {
    last = submit(true);
    ++accepted;
  } while (!last.done() && accepted < 1 << 17);
  ASSERT_TRUE(last.done());
  EXPECT_EQ(last.result().error().code, ErrorCode::kResourceExhausted);
  EXPECT_EQ(queue_->sequence(), static_cast<uint64_t>(accepted)) << "a refused call takes no number";
}

TEST_F(CallQueueTest, CallsTheHookThatWasSetAtSubmission) {
  std::vector<std::string> calls;
  const auto hook = [&](const char* name) {
    return [&calls, name](const Finished& finished) {
      calls.push_back(name + std::to_string(finished.call.sequence));
      EXPECT_LE(finished.submitted, finished.started);
      EXPECT_LE(finished.started, finished.ended);
    };
  };
  queue_->set_hook(hook("a"));
  const Work work = submit_blocked();
  queue_->set_hook(hook("b"));
  const Work next = submit(true);
  queue_->set_hook(nullptr);
  unblock();
  EXPECT_TRUE(queue_->wait_for_pending(test_deadline()));
  EXPECT_EQ(calls, (std::vector<std::string>{"a1", "b2"}));
}

TEST_F(CallQueueTest, ACallbackMayWaitForAnotherCall) {
  std::promise<bool> ended;
  submit(true).on_done([&](const Result<>&) { ended.set_value(submit(true).wait(test_deadline()).has_value()); });
  EXPECT_TRUE(ended.get_future().get());
}

TEST(ExecutionLockTest, GivesNumbersWithoutTheMutexOnlyWhileIdle) {
  ExecutionLock lock;
  EXPECT_EQ(lock.take_if_idle(), 1);
  EXPECT_EQ(lock.take_if_idle(), 0) << "taken";
  EXPECT_TRUE(lock.release_if_idle(1));
  EXPECT_EQ(lock.take_if_idle(), 2);
  lock.require_slow_path();
  EXPECT_FALSE(lock.release_if_idle(2));
  EXPECT_TRUE(lock.taken());
  EXPECT_EQ(lock.next_sequence(), 3);
  lock.release(false);
  EXPECT_EQ(lock.take_if_idle(), 0) << "the slow path is required";
  lock.take();
  lock.release(true);
  EXPECT_EQ(lock.take_if_idle(), 4);
  EXPECT_EQ(lock.sequence(), 4);
}

}  // namespace
}  // namespace muster
