#include "muster/store/ttl_lock.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>

#include "store/expect.h"

namespace muster {
namespace {

// A store with scripted answers that counts the requests.
class FakeStore {
 public:
  RenewedTtlLock::Store store() {
    return {[this](const Deadline&) -> Result<bool> {
              const std::lock_guard lock(mutex_);
              ++renewals_;
              asked_.notify_all();
              return answer_;
            },
            [this](const Deadline&) { ++released; }};
  }
  void answer(Result<bool> answer) {
    const std::lock_guard lock(mutex_);
    answer_ = std::move(answer);
  }
  void wait_for_renewals(int count) {
    std::unique_lock lock(mutex_);
    const int wanted = renewals_ + count;
    EXPECT_TRUE(asked_.wait_for(lock, 60s, [&] { return renewals_ >= wanted; }));
  }
  std::atomic<int> released = 0;

 private:
  std::mutex mutex_;
  std::condition_variable asked_;
  int renewals_ = 0;
  Result<bool> answer_ = true;
};

bool is_lost_in_time(const TtlLock& lock) {
  const Deadline deadline = Deadline::after(60s);
  while (lock.held() && !deadline.passed()) std::this_thread::yield();
  return !lock.held();
}

TEST(RenewedTtlLock, RenewsItselfUntilItIsReleased) {
  FakeStore fake;
  {
    const RenewedTtlLock lock(fake.store(), steady_clock().now(), 30s);
    EXPECT_TRUE(lock.held());
    EXPECT_EQ(fake.released, 0);
  }
  EXPECT_EQ(fake.released, 1);
  const RenewedTtlLock brief(fake.store(), steady_clock().now(), 900ms);  // 900 ms, because a loaded machine may pause
  fake.wait_for_renewals(3);
}

TEST(RenewedTtlLock, IsLostWhenTheStoreReportsIt) {
  FakeStore fake;
  fake.answer(false);
  {
    const RenewedTtlLock lock(fake.store(), steady_clock().now(), 300ms);
    EXPECT_TRUE(is_lost_in_time(lock));
  }
  EXPECT_EQ(fake.released, 0) << "it is another's by now";
}

TEST(RenewedTtlLock, IsLostAfterItsTimeToLiveWithoutAnswer) {
  FakeStore fake;
  fake.answer(fail(ErrorCode::kPeerLost, "gone"));
  const RenewedTtlLock lock(fake.store(), steady_clock().now(), 300ms);
  EXPECT_TRUE(is_lost_in_time(lock));
}

TEST(RenewedTtlLock, RetriesSoonAfterAnError) {
  FakeStore fake;
  fake.answer(fail(ErrorCode::kTimeout, "busy"));
  const RenewedTtlLock lock(fake.store(), steady_clock().now(), 9s);
  fake.wait_for_renewals(3);  // without errors, only two renewals fit into 9 s
  EXPECT_TRUE(lock.held());
  fake.answer(true);
  fake.wait_for_renewals(2);
  EXPECT_TRUE(lock.held());
}

/// The child has no thread that renews the lock, and the lock is still the parent's.
TEST(RenewedTtlLock, IsNotReleasedByAForkedChild) {
  FakeStore fake;
  std::unique_ptr<TtlLock> lock = std::make_unique<RenewedTtlLock>(fake.store(), steady_clock().now(), 30s);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // ends a child that waits for the thread
    lock.reset();
    _exit(fake.released == 0 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_TRUE(lock->held());
  lock.reset();
  EXPECT_EQ(fake.released, 1);
}

TEST(RenewedTtlLock, LivesFromTheTimeOfTheRequest) {
  FakeStore fake;
  const RenewedTtlLock late(fake.store(), TimePoint{steady_clock().now().ns - Duration(10s).count()}, 5s);
  EXPECT_FALSE(late.held());
}

}  // namespace
}  // namespace muster
