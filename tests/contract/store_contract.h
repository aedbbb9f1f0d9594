#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "muster/store/store.h"
#include "store/expect.h"

namespace muster {

/// The behavior that every Store must have. An implementation instantiates the suite with a function that makes a
/// StoreWorld, which holds a new, empty store. The function returns null if the store cannot run on this machine:
///
///   INSTANTIATE_TEST_SUITE_P(Memory, StoreContract, testing::Values(make_memory_world));
struct StoreWorld {
  virtual ~StoreWorld() = default;
  /// A new handle on the one store of this world. It is independent of the other handles.
  virtual std::unique_ptr<Store> open() = 0;
  /// The size in bytes of a value that the store must be able to keep.
  virtual size_t big() const { return 16 << 20; }
};
using MakeStoreWorld = std::function<std::unique_ptr<StoreWorld>()>;

class StoreContract : public testing::TestWithParam<MakeStoreWorld> {
 protected:
  void SetUp() override {
    world_ = GetParam()();
    if (world_ == nullptr) GTEST_SKIP() << "what this store needs is not installed";
    store_ = world_->open();
    ASSERT_NE(store_, nullptr);
  }
  void TearDown() override {
    store_.reset();
    world_.reset();
  }

  /// Runs `body(i, handle)` in `count` threads. Each thread has its own handle.
  void in_threads(int count, const std::function<void(int, Store&)>& body) {
    std::vector<std::unique_ptr<Store>> handles;
    for (int i = 0; i < count; ++i) handles.push_back(world_->open());
    std::vector<std::thread> threads;
    for (int i = 0; i < count; ++i) threads.emplace_back([&, i] { body(i, *handles[static_cast<size_t>(i)]); });
    for (auto& thread : threads) thread.join();
  }

  static Deadline soon() { return Deadline::after(60s); }
  static Deadline already() { return Deadline::after(Duration{0}); }
  static Deadline shortly() { return Deadline::after(30ms); }

  std::unique_ptr<StoreWorld> world_;
  std::unique_ptr<Store> store_;
};

TEST_P(StoreContract, KeepsSetValues) {
  EXPECT_OK(store_->set("k", as_bytes("one"), soon()));
  EXPECT_EQ(store_->get("k", soon()), to_bytes("one"));
  EXPECT_OK(store_->set("k", as_bytes("two"), soon()));
  EXPECT_EQ(world_->open()->get("k", soon()), to_bytes("two"));
  EXPECT_OK(store_->set("k", {}, soon()));
  EXPECT_EQ(store_->get("k", soon()), Bytes{});
}

TEST_P(StoreContract, AcceptsAnyBytesAsKeyAndValue) {
  Bytes all(256);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint8_t>(i);
  const Key key = to_string(all);
  EXPECT_OK(store_->set(key, all, soon()));
  EXPECT_OK(store_->set("", as_bytes("empty key"), soon()));
  EXPECT_EQ(store_->get(key, soon()), all);
  EXPECT_EQ(store_->get("", soon()), to_bytes("empty key"));
  EXPECT_EQ(store_->check({key, ""}, soon()), true);
}

TEST_P(StoreContract, KeepsBigValues) {
  Bytes big(world_->big());
  for (size_t i = 0; i < big.size(); ++i) big[i] = static_cast<uint8_t>(i * 2654435761U >> 13);
  EXPECT_OK(store_->set("big", big, soon()));
  EXPECT_TRUE(world_->open()->get("big", soon()) == big);
}

TEST_P(StoreContract, RefusesKeysOverTheLimit) {
  expect_error(store_->set(Key(100 << 10, 'k'), as_bytes("v"), soon()), ErrorCode::kResourceExhausted, "65536");
  EXPECT_EQ(store_->num_keys(soon()), 0);
}

TEST_P(StoreContract, ComparesBeforeItSets) {
  EXPECT_EQ(store_->compare_set("k", as_bytes("x"), as_bytes("y"), soon()), to_bytes("x")) << "absent: as torch";
  EXPECT_EQ(store_->check({"k"}, soon()), false);
  EXPECT_EQ(store_->compare_set("k", {}, as_bytes("1"), soon()), to_bytes("1"));
  EXPECT_EQ(store_->compare_set("k", as_bytes("0"), as_bytes("2"), soon()), to_bytes("1"));
  EXPECT_EQ(store_->compare_set("k", as_bytes("1"), as_bytes("2"), soon()), to_bytes("2"));
  EXPECT_EQ(store_->get("k", soon()), to_bytes("2"));
}

TEST_P(StoreContract, OneCallerWinsEachCompareSetRace) {
  for (int round = 0; round < 20; ++round) {
    const Key key = "race" + std::to_string(round);
    std::atomic<int> winners = 0;
    in_threads(4, [&](int i, Store& store) {
      const Bytes mine = to_bytes("thread " + std::to_string(i));
      const auto now = store.compare_set(key, {}, mine, soon());
      EXPECT_TRUE(now.has_value());
      if (now && *now == mine) ++winners;
    });
    EXPECT_EQ(winners, 1);
  }
}

TEST_P(StoreContract, AddsToCounters) {
  EXPECT_EQ(store_->add("n", 5, soon()), 5);
  EXPECT_EQ(store_->add("n", -7, soon()), -2);
  EXPECT_EQ(store_->get("n", soon()), to_bytes("-2"));
  EXPECT_OK(store_->set("n", as_bytes("41"), soon()));
  EXPECT_EQ(store_->add("n", 1, soon()), 42);
  EXPECT_EQ(store_->add("zero", 0, soon()), 0);
  EXPECT_EQ(store_->check({"zero"}, soon()), true);
}

TEST_P(StoreContract, AddsExactlyWhenManyAdd) {
  in_threads(8, [](int i, Store& store) {
    for (int n = 0; n < 50; ++n) EXPECT_OK(store.add("sum", i + 1, soon()));
  });
  EXPECT_EQ(store_->add("sum", 0, soon()), 50 * 36);
}

TEST_P(StoreContract, RefusesToAddToANonNumber) {
  EXPECT_OK(store_->set("text", as_bytes("12 monkeys"), soon()));
  expect_error(store_->add("text", 1, soon()), ErrorCode::kInvalidArgument, "text");
  EXPECT_EQ(store_->get("text", soon()), to_bytes("12 monkeys"));
  EXPECT_EQ(store_->add("top", INT64_MAX, soon()), INT64_MAX);
  expect_error(store_->add("top", 1, soon()), ErrorCode::kInvalidArgument, "overflow");
  EXPECT_EQ(store_->add("top", 0, soon()), INT64_MAX);
}

TEST_P(StoreContract, ChecksWithoutWaiting) {
  EXPECT_EQ(store_->check({}, soon()), true);
  EXPECT_EQ(store_->check({"a"}, soon()), false);
  EXPECT_OK(store_->set("a", as_bytes("1"), soon()));
  EXPECT_EQ(store_->check({"a"}, soon()), true);
  EXPECT_EQ(store_->check({"a", "b"}, soon()), false);
}

TEST_P(StoreContract, DeletesKeys) {
  EXPECT_OK(store_->set("a", as_bytes("1"), soon()));
  EXPECT_EQ(store_->delete_key("a", soon()), true);
  EXPECT_EQ(store_->delete_key("a", soon()), false);
  EXPECT_EQ(store_->check({"a"}, soon()), false);
  EXPECT_EQ(store_->num_keys(soon()), 0);
}

TEST_P(StoreContract, CountsAndListsKeys) {
  EXPECT_EQ(store_->list_keys("", soon()), std::vector<Key>{});
  EXPECT_OK(store_->multi_set({"b/2", "a", "b/1"}, {{1}, {2}, {3}}, soon()));
  EXPECT_EQ(store_->num_keys(soon()), 3);
  EXPECT_EQ(store_->list_keys("", soon()), (std::vector<Key>{"a", "b/1", "b/2"}));
  EXPECT_EQ(store_->list_keys("b/", soon()), (std::vector<Key>{"b/1", "b/2"}));
  EXPECT_EQ(store_->list_keys("c", soon()), std::vector<Key>{});
}

TEST_P(StoreContract, Appends) {
  EXPECT_OK(store_->append("k", as_bytes("one "), soon()));
  EXPECT_OK(store_->append("k", as_bytes("two"), soon()));
  EXPECT_EQ(store_->get("k", soon()), to_bytes("one two"));
}

TEST_P(StoreContract, SetsAndGetsManyKeysAtOnce) {
  std::vector<Key> keys;
  std::vector<Bytes> values;
  for (int i = 0; i < 2000; ++i) {
    keys.push_back("key " + std::to_string(i));
    values.push_back(to_bytes(std::to_string(i * i)));
  }
  EXPECT_OK(store_->multi_set(keys, values, soon()));
  std::reverse(keys.begin(), keys.end());
  std::reverse(values.begin(), values.end());
  EXPECT_EQ(store_->multi_get(keys, soon()), values);
  EXPECT_EQ(store_->multi_get({}, soon()), std::vector<Bytes>{});
  expect_error(store_->multi_set({"a", "b"}, {{1}}, soon()), ErrorCode::kInvalidArgument, "value");
}

TEST_P(StoreContract, ReleasesWaitersHoweverTheKeyIsCreated) {
  const std::vector<std::function<void(Store&, const Key&)>> ways = {
      [](Store& s, const Key& k) { EXPECT_OK(s.set(k, as_bytes("7"), soon())); },
      [](Store& s, const Key& k) { EXPECT_OK(s.add(k, 7, soon())); },
      [](Store& s, const Key& k) { EXPECT_OK(s.append(k, as_bytes("7"), soon())); },
      [](Store& s, const Key& k) { EXPECT_OK(s.compare_set(k, {}, as_bytes("7"), soon())); },
      [](Store& s, const Key& k) { EXPECT_OK(s.multi_set({k}, {to_bytes("7")}, soon())); },
  };
  for (size_t way = 0; way < ways.size(); ++way) {
    const Key key = "way " + std::to_string(way);
    in_threads(4, [&](int i, Store& store) {
      switch (i) {
        case 0:
          EXPECT_EQ(store.get(key, soon()), to_bytes("7"));
          break;
        case 1:
          EXPECT_OK(store.wait({key}, soon()));
          break;
        case 2:
          EXPECT_EQ(store.multi_get({key, key}, soon()), (std::vector<Bytes>{{'7'}, {'7'}}));
          break;
        default:
          ways[way](store, key);
      }
    });
  }
}

TEST_P(StoreContract, WaitsForAllKeys) {
  in_threads(3, [](int i, Store& store) {
    if (i == 0) {
      EXPECT_OK(store.wait({"a", "b", "c"}, soon()));
      EXPECT_EQ(store.check({"a", "b", "c"}, soon()), true);
    } else if (i == 1) {
      EXPECT_OK(store.set("c", as_bytes("3"), soon()));
      EXPECT_OK(store.set("a", as_bytes("1"), soon()));
    } else {
      EXPECT_OK(store.set("b", as_bytes("2"), soon()));
    }
  });
}

TEST_P(StoreContract, ServesThreadsThatShareOneHandle) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&, i] {
      const Key mine = "shared " + std::to_string(i), next = "shared " + std::to_string((i + 1) % 6);
      for (int round = 0; round < 5; ++round) {
        const Key suffix = " in round " + std::to_string(round);
        EXPECT_OK(store_->set(mine + suffix, as_bytes(mine), soon()));
        EXPECT_EQ(store_->get(next + suffix, soon()), to_bytes(next));
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST_P(StoreContract, TimesOutAtTheDeadlineAndNamesTheKeys) {
  expect_error(store_->get("never set", shortly()), ErrorCode::kTimeout, "never set");
  expect_error(store_->wait({"this neither", "nor that"}, shortly()), ErrorCode::kTimeout, "nor that");
  expect_error(store_->multi_get({"or this"}, shortly()), ErrorCode::kTimeout, "or this");
  expect_error(store_->queue_pop("an empty queue", shortly()), ErrorCode::kTimeout, "an empty queue");
  expect_error(store_->barrier("a barrier with one arrival", 2, shortly()), ErrorCode::kTimeout,
               "a barrier with one arrival");
  EXPECT_OK(store_->set("afterwards", as_bytes("it still works"), soon()));
  EXPECT_EQ(store_->get("afterwards", soon()), to_bytes("it still works"));
}

TEST_P(StoreContract, GivesOutQueueItemsInOrder) {
  EXPECT_EQ(store_->queue_length("q", soon()), 0);
  for (int i = 0; i < 10; ++i) EXPECT_OK(store_->queue_push("q", to_bytes(std::to_string(i)), soon()));
  EXPECT_EQ(store_->queue_length("q", soon()), 10);
  EXPECT_EQ(store_->check({"q"}, soon()), true);
  EXPECT_EQ(store_->num_keys(soon()), 0) << "a queue is no key, as in torch";
  for (int i = 0; i < 10; ++i) EXPECT_EQ(store_->queue_pop("q", soon()), to_bytes(std::to_string(i)));
  EXPECT_EQ(store_->check({"q"}, soon()), false);
}

TEST_P(StoreContract, GivesEachQueueItemToOneCaller) {
  std::atomic<int64_t> sum = 0;
  in_threads(6, [&](int i, Store& store) {
    for (int n = 1; n <= 20; ++n) {
      if (i % 2 == 0) {
        EXPECT_OK(store.queue_push("jobs", Bytes{static_cast<uint8_t>(n)}, soon()));
      } else {
        const auto item = store.queue_pop("jobs", soon());
        EXPECT_TRUE(item && item->size() == 1);
        if (item) sum += item->at(0);
      }
    }
  });
  EXPECT_EQ(sum, 3 * 210);
  EXPECT_EQ(store_->queue_length("jobs", soon()), 0);
}

TEST_P(StoreContract, LosesNoQueueItemToATimedOutPop) {
  expect_error(store_->queue_pop("q", shortly()), ErrorCode::kTimeout);
  EXPECT_OK(store_->queue_push("q", as_bytes("kept"), soon()));
  EXPECT_EQ(store_->queue_pop("q", soon()), to_bytes("kept"));
}

TEST_P(StoreContract, ReusesABarrier) {
  constexpr int kRanks = 4, kRounds = 50;
  std::array<std::atomic<int>, kRounds> arrived{};
  in_threads(kRanks, [&](int, Store& store) {
    for (size_t round = 0; round < kRounds; ++round) {
      ++arrived[round];
      EXPECT_OK(store.barrier("rounds", kRanks, soon()));
      EXPECT_EQ(arrived[round], kRanks);
    }
  });
  EXPECT_OK(store_->barrier("alone", 1, soon()));
}

TEST_P(StoreContract, WithdrawsATimedOutArrival) {
  expect_error(store_->barrier("b", 2, shortly()), ErrorCode::kTimeout);
  expect_error(store_->barrier("b", 2, shortly()), ErrorCode::kTimeout);
  in_threads(2, [](int, Store& store) { EXPECT_OK(store.barrier("b", 2, soon())); });
}

TEST_P(StoreContract, ReportsDifferentBarrierCounts) {
  expect_error(store_->barrier("b", 0, soon()), ErrorCode::kInvalidArgument, "count");
  in_threads(2, [](int i, Store& store) {
    // One caller waits with a count of 2. The other caller tries a count of 3 until the error says that a caller
    // already waits with another count.
    const auto retry = [&](int64_t count, const Deadline& deadline, ErrorCode code) {
      Result<> outcome = store.barrier("b", count, deadline);
      while (!outcome && outcome.error().code == code) {
        std::this_thread::yield();
        outcome = store.barrier("b", count, deadline);
      }
      return outcome;
    };
    if (i == 1) expect_error(retry(3, already(), ErrorCode::kTimeout), ErrorCode::kMismatch, "barrier");
    EXPECT_OK(retry(2, soon(), ErrorCode::kMismatch));
  });
}

TEST_P(StoreContract, ClonesSeeTheSameData) {
  auto copy = store_->clone();
  ASSERT_TRUE(copy.has_value()) << copy.error().to_string();
  EXPECT_OK((*copy)->set("k", as_bytes("v"), soon()));
  EXPECT_EQ(store_->get("k", soon()), to_bytes("v"));
  EXPECT_OK(store_->set("k", as_bytes("w"), soon()));
  EXPECT_EQ((*copy)->get("k", soon()), to_bytes("w"));
}

TEST_P(StoreContract, AnswersAfterTheDeadlineIfItNeedNotWait) {
  EXPECT_OK(store_->set("k", as_bytes("v"), soon()));
  // A call that need not wait may still be answered after its deadline. A call that has to wait must not hang.
  const auto value = store_->get("k", already());
  EXPECT_TRUE(value == to_bytes("v") || value.error().code == ErrorCode::kTimeout);
  expect_error(store_->wait({"missing"}, already()), ErrorCode::kTimeout, "missing");
}

}  // namespace muster
