#include "muster/store/ttl_lock.h"

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

TEST(RenewedTtlLock, LivesFromTheTimeOfTheRequest) {
  FakeStore fake;
  const RenewedTtlLock late(fake.store(), TimePoint{steady_clock().now().ns - Duration(10s).count()}, 5s);
  EXPECT_FALSE(late.held());
}

}  // namespace
}  // namespace muster
