#include "muster/launch/rendezvous/rendezvous_client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>

namespace muster {
namespace {

constexpr Duration kWriteTime = std::chrono::seconds(60);

// A store in memory. Its set() waits for the next heartbeat, or fails at its deadline.
class SlowStore : public Store {
 public:
  Result<> set(const Key&, ByteView, const Deadline& deadline) override {
    std::unique_lock lock(mutex_);
    const int before = heartbeats_;
    while (heartbeats_ == before && !deadline.passed()) changed_.wait_for(lock, deadline.left());
    if (heartbeats_ > before) return {};
    return fail(ErrorCode::kTimeout, "no heartbeat came while a value was written");
  }
  Result<> queue_push(const Key& key, ByteView value, const Deadline& deadline) override {
    if (const auto event = parse_node_event(value); event && event->kind == NodeEvent::Kind::kAlive) {
      const std::lock_guard lock(mutex_);
      ++heartbeats_;
      changed_.notify_all();
    }
    return base_->queue_push(key, value, deadline);
  }

  Result<Bytes> get(const Key& key, const Deadline& deadline) override { return base_->get(key, deadline); }
  Result<Bytes> compare_set(const Key& key, ByteView expected, ByteView desired, const Deadline& deadline) override {
    return base_->compare_set(key, expected, desired, deadline);
  }
  Result<int64_t> add(const Key& key, int64_t amount, const Deadline& deadline) override {
    return base_->add(key, amount, deadline);
  }
  Result<bool> check(const std::vector<Key>& keys, const Deadline& deadline) override {
    return base_->check(keys, deadline);
  }
  Result<> wait(const std::vector<Key>& keys, const Deadline& deadline) override { return base_->wait(keys, deadline); }
  Result<bool> delete_key(const Key& key, const Deadline& deadline) override {
    return base_->delete_key(key, deadline);
  }
  Result<int64_t> num_keys(const Deadline& deadline) override { return base_->num_keys(deadline); }
  Result<> append(const Key& key, ByteView value, const Deadline& deadline) override {
    return base_->append(key, value, deadline);
  }
  Result<std::vector<Bytes>> multi_get(const std::vector<Key>& keys, const Deadline& deadline) override {
    return base_->multi_get(keys, deadline);
  }
  Result<> multi_set(const std::vector<Key>& keys, const std::vector<Bytes>& values,
                     const Deadline& deadline) override {
    return base_->multi_set(keys, values, deadline);
  }
  Result<Bytes> queue_pop(const Key& key, const Deadline& deadline) override { return base_->queue_pop(key, deadline); }
  Result<int64_t> queue_length(const Key& key, const Deadline& deadline) override {
    return base_->queue_length(key, deadline);
  }
  Result<std::vector<Key>> list_keys(std::string_view prefix, const Deadline& deadline) override {
    return base_->list_keys(prefix, deadline);
  }
  Result<> barrier(const Key& key, int64_t count, const Deadline& deadline) override {
    return base_->barrier(key, count, deadline);
  }
  Result<std::unique_ptr<Store>> clone() override { return base_->clone(); }

 private:
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
