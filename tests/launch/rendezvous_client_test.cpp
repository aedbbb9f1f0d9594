#include "muster/launch/rendezvous/rendezvous_client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>

#include "muster/store/state/state.h"

namespace muster {
namespace {

constexpr Duration kWriteTime = std::chrono::seconds(60);

// A store in memory. Its set() waits for the next heartbeat, or fails at its deadline.
class SlowStore : public Store {
 public:
  Result<Reply> call(Request request, const Deadline& deadline) override {
    if (request.operation == StoreOperation::kSet) return wait_for_heartbeat(deadline);
    if (request.operation == StoreOperation::kQueuePush) {
      const auto event = parse_node_event(request.values[0]);
      if (event && event->kind == NodeEvent::Kind::kAlive) {
        const std::lock_guard lock(mutex_);
        ++heartbeats_;
        changed_.notify_all();
      }
    }
    return base_->call(std::move(request), deadline);
  }
  Result<std::unique_ptr<Store>> clone() override { return base_->clone(); }

 private:
  Result<Reply> wait_for_heartbeat(const Deadline& deadline) {
    std::unique_lock lock(mutex_);
    const int before = heartbeats_;
    while (heartbeats_ == before && !deadline.passed()) changed_.wait_for(lock, deadline.left());
    if (heartbeats_ > before) return Reply{};
    return fail(ErrorCode::kTimeout, "no heartbeat came while a value was written");
  }

  const std::unique_ptr<Store> base_ = memory_store();
  std::mutex mutex_;
  std::condition_variable changed_;
  int heartbeats_ = 0;
};

TEST(RendezvousClient, SendsHeartbeatsDuringASlowWrite) {
  auto slow = std::make_unique<SlowStore>();
  const auto store = slow->clone().value();
  std::mutex mutex;
  std::string lost;
  RendezvousClient::Events events;
  events.job_event = [](const JobEvent&, const std::optional<Assignment>&) {};
  events.lost = [&](const Error& why) {
    const std::lock_guard lock(mutex);
    lost = why.message;
  };
  const RendezvousClient::Options options{"run", "node", std::chrono::seconds(10)};
  const auto client = RendezvousClient::start(std::move(slow), options, std::move(events)).value();
  client->publish("key", to_bytes("value"));
  EXPECT_TRUE(client->flush(Deadline::after(kWriteTime)));
  const std::lock_guard lock(mutex);
  EXPECT_EQ(lost, "");
  // After the outcome the client waits for no more events.
  const JobEvent outcome{JobEvent::Kind::kOutcome};
  ASSERT_TRUE(store->set(client->keys().event(1), encode(outcome), Deadline::after(kWriteTime)));
}

}  // namespace
}  // namespace muster
