#pragma once

#include "contract/store_contract.h"
#include "muster/store/ttl_lock.h"

namespace muster {

/// The behavior of TTL locks (claims) that every store with locks must have.
class TtlLockContract : public StoreContract {
 protected:
  static constexpr Duration kLife = 60s;

  std::unique_ptr<TtlLock> take_lock(Store& store, const Key& name, const std::string& value) {
    auto lock = store.claim(name, as_bytes(value), kLife, soon());
    if (lock) return std::move(*lock);
    ADD_FAILURE() << lock.error().to_string();
    return nullptr;
  }
};

TEST_P(TtlLockContract, GrantsANameToOneHolder) {
  const auto other = world_->open();
  const auto mine = take_lock(*store_, "root", "node a");
  EXPECT_TRUE(mine->held());
  expect_error(other->claim("root", as_bytes("node b"), kLife, soon()), ErrorCode::kAlreadyExists, "root");
  EXPECT_EQ(other->claims("root", soon()), (std::map<Key, Bytes>{{"root", to_bytes("node a")}}));
  EXPECT_EQ(other->num_keys(soon()), 0) << "a lock is no key";
}

TEST_P(TtlLockContract, ListsNamesAndHolders) {
  const auto other = world_->open();
  EXPECT_EQ(store_->claims("", soon()), (std::map<Key, Bytes>{}));
  const auto a = take_lock(*store_, "node/1", "a");
  const auto b = take_lock(*other, "node/2", std::string("b\0\xff", 3));
  const auto c = take_lock(*other, "root", "");
  EXPECT_EQ(store_->claims("node/", soon()),
            (std::map<Key, Bytes>{{"node/1", to_bytes("a")}, {"node/2", {'b', 0, 0xff}}}));
  EXPECT_EQ(store_->claims("", soon())->size(), 3U);
}

TEST_P(TtlLockContract, ReleasesItsNameOnDestruction) {
  const auto other = world_->open();
  take_lock(*store_, "root", "first").reset();
  EXPECT_EQ(other->claims("", soon()), (std::map<Key, Bytes>{}));
  const auto second = take_lock(*other, "root", "second");
  EXPECT_EQ(store_->claims("root", soon())->at("root"), to_bytes("second"));
}

TEST_P(TtlLockContract, GrantsEachRaceToOneContender) {
  for (int round = 0; round < 5; ++round) {
    std::atomic<int> winners = 0;
    in_threads(4, [&](int, Store& store) {
      const auto mine = store.claim("root", {}, kLife, soon());
      if (mine) ++winners;
      EXPECT_OK(store.barrier("all tried", 4, soon()));
    });
    EXPECT_EQ(winners, 1);
  }
}

}  // namespace muster
