#include "muster/torch/store.h"

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "group/ranks.h"

namespace muster {
namespace {

using std::chrono::milliseconds;

Deadline soon() { return Deadline::after(std::chrono::seconds(60)); }
Deadline shortly() { return Deadline::after(std::chrono::milliseconds(30)); }

/// Calls every operation through muster's interface.
void exercise(Store& store) {
  EXPECT_TRUE(store.set("k", as_bytes("v"), soon()));
  EXPECT_EQ(store.get("k", soon()), to_bytes("v"));
  EXPECT_EQ(store.compare_set("k", as_bytes("v"), as_bytes("w"), soon()), to_bytes("w"));
  EXPECT_EQ(store.compare_set("exchanged", as_bytes("x"), as_bytes("y"), soon()), to_bytes("x"));
  EXPECT_EQ(store.compare_set("exchanged", {}, as_bytes("y"), soon()), to_bytes("y"));
  EXPECT_EQ(store.add("n", 5, soon()), 5);
  EXPECT_EQ(store.add("n", -7, soon()), -2);
  EXPECT_EQ(store.check({"k", "n"}, soon()), true);
  EXPECT_EQ(store.check({"k", "absent"}, soon()), false);
  EXPECT_TRUE(store.wait({"k", "n"}, soon()));
  EXPECT_TRUE(store.append("k", as_bytes("+"), soon()));
  EXPECT_TRUE(store.multi_set({"a", "b"}, {to_bytes("1"), to_bytes("2")}, soon()));
  EXPECT_EQ(store.multi_get({"b", "k", "a"}, soon()), (std::vector<Bytes>{{'2'}, to_bytes("w+"), {'1'}}));
  EXPECT_EQ(store.delete_key("a", soon()), true);
  EXPECT_EQ(store.delete_key("a", soon()), false);
  EXPECT_TRUE(store.queue_push("q", as_bytes("first"), soon()));
  EXPECT_TRUE(store.queue_push("q", as_bytes("second"), soon()));
  EXPECT_EQ(store.queue_length("q", soon()), 2);
  EXPECT_EQ(store.queue_pop("q", soon()), to_bytes("first"));
  EXPECT_EQ(store.queue_pop("q", soon()), to_bytes("second"));
  const auto copy = store.clone();
  ASSERT_TRUE(copy) << copy.error().to_string();
  EXPECT_EQ((*copy)->get("b", soon()), to_bytes("2"));
}

void expect_timeouts(Store& store) {
  EXPECT_EQ(store.get("absent", shortly()).error().code, ErrorCode::kTimeout);
  EXPECT_EQ(store.wait({"k", "absent"}, shortly()).error().code, ErrorCode::kTimeout);
  EXPECT_EQ(store.multi_get({"absent"}, shortly()).error().code, ErrorCode::kTimeout);
  EXPECT_EQ(store.queue_pop("empty", shortly()).error().code, ErrorCode::kTimeout);
  EXPECT_EQ(store.barrier("lonely", 2, shortly()).error().code, ErrorCode::kTimeout);
}

TEST(MusterStoreAdapter, HasEveryOperationOfTorchsHashStore) {
  const auto store = store_over_c10d(c10::make_intrusive<c10d::HashStore>());
  exercise(*store);
  expect_timeouts(*store);
}

TEST(MusterStoreAdapter, WorksThroughPrefixStores) {
  const auto base = c10::make_intrusive<c10d::HashStore>();
  const auto store = store_over_c10d(c10::make_intrusive<c10d::PrefixStore>("group", base));
  exercise(*store);
  expect_timeouts(*store);
  EXPECT_TRUE(base->check({"group/k"}));
}

TEST(MusterStoreAdapter, AdaptsAnAdaptedMusterStore) {
  const auto store = store_over_c10d(c10d_over_store(memory_store()));
  exercise(*store);
  expect_timeouts(*store);
  EXPECT_EQ(store->list_keys("b", soon()), std::vector<Key>{"b"});
  EXPECT_EQ(store->add("k", 1, soon()).error().code, ErrorCode::kInvalidArgument) << "the value is no number";
}

TEST(MusterStoreAdapter, ReusesABarrier) {
  const auto base = c10::make_intrusive<c10d::HashStore>();
  std::array<std::atomic<int>, 20> arrived{};
  test::run_ranks(3, [&](Rank) {
    const auto store = store_over_c10d(base);
    for (auto& round : arrived) {
      ++round;
      EXPECT_TRUE(store->barrier("b", 3, soon()));
      EXPECT_EQ(round, 3);
    }
  });
}

/// Calls a muster store through torch's interface.
TEST(C10dStoreAdapter, BehavesAsTorchsStoresDo) {
  const auto store = c10d_over_store(memory_store());
  EXPECT_TRUE(store->hasExtendedApi());
  store->set("k", std::string("v"));
  EXPECT_EQ(store->get_to_str("k"), "v");
  EXPECT_EQ(store->compareSet("k", "v", "w"), "w");
  EXPECT_EQ(store->add("n", 3), 3);
  EXPECT_EQ(store->getNumKeys(), 2);
  EXPECT_TRUE(store->deleteKey("n"));
  store->queuePush("q", to_bytes("item"));
  EXPECT_EQ(store->queueLen("q"), 1);
  EXPECT_EQ(store->queuePop("q", /*block=*/true), to_bytes("item"));
  EXPECT_THROW(store->queuePop("q", /*block=*/false), c10::DistQueueEmptyError);
  EXPECT_EQ(store->clone()->get_to_str("k"), "w");
}

TEST(C10dStoreAdapter, TurnsErrorsIntoTorchs) {
  const auto store = c10d_over_store(memory_store());
  store->setTimeout(milliseconds(30));
  EXPECT_THROW(store->get("absent"), c10::DistStoreError);
  EXPECT_THROW(store->wait({"absent"}), c10::DistStoreError);
  EXPECT_THROW(store->wait({"absent"}, milliseconds(20)), c10::DistStoreError);
  EXPECT_THROW(store->queuePop("absent", /*block=*/true), c10::DistStoreError);
  store->set("text", std::string("12 monkeys"));
  EXPECT_THROW(store->add("text", 1), c10::ValueError);
}

}  // namespace
}  // namespace muster
