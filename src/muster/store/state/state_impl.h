#pragma once

#include <atomic>
#include <bit>

#include "muster/store/state/shard.h"

namespace muster {

/// The caller of every function holds the locks of the shards of all keys that it uses.
struct StoreState::Impl {
  explicit Impl(unsigned shard_count) : count(shard_count), shards(std::make_unique<Shard[]>(shard_count)) {}

  const unsigned count;
  const std::unique_ptr<Shard[]> shards;
  // The number of revocations. revoke() increments it after all shards have carried out the revocation. Relaxed order
  // is enough: grant() reads it under a shard's lock, and revoke() takes that lock before it increments. So a lease
  // that was granted before the revocation has a smaller number. A later lease may have a smaller number too, and is
  // then withdrawn, which is safe.
  std::atomic<uint64_t> revocations{0};

  unsigned index(const Key& key) const { return count == 1 ? 0 : std::hash<Key>()(key) % count; }
  Shard& shard(const Key& key) const { return shards[index(key)]; }
  Slot& slot(const Key& key) const { return *shard(key).entries.try_emplace(key).first; }
  ShardMask everywhere() const { return count == kMaxShards ? ~ShardMask{0} : (ShardMask{1} << count) - 1; }
  ShardMask shards_of(const Request& request) const;
  ShardMask shards_of_released(const Request& request) const;

  void run(Request&& request, ClientId client, Replies& out);
  Result<> write(Request& request, Reply& reply, Replies& released);

  void set(Request& request, Reply& reply, Replies& released);
  Result<> compare_set(Request& request, Reply& reply, Replies& released);
  Result<> add(Request& request, Reply& reply, Replies& released);
  Result<> append(Request& request, Replies& released);
  void push(Request& request, Replies& released);
  void store(const Key& key, Bytes value, Replies& released);

  bool present(StoreOperation operation, const Key& key) const;
  size_t missing(const Request& request, size_t from) const;
  bool ready(const Request& request, size_t& cursor) const;
  void answer(const Request& request, Reply& reply);
  bool answer_or_wait(Request& request, Reply& reply);
  Result<> arrive(Request&& request, ClientId client, Replies& released);
  void release_round(Slot& slot, Replies& released);
  void take_back(Waiter& waiter, uint32_t count);
  void withdraw(const Request& request, Reply& reply);
  bool advance(Waiter& waiter, Replies& released);
  void forget(Waiter& waiter);
  void key_appeared(Slot& slot, Replies& released);

  void answer_values(const Request& request, Reply& reply);
  bool grant(const std::vector<Key>& keys, Reply& reply);
  bool defer(Request& request, ClientId client, Replies& out);
};

/// Holds the locks of some shards. It takes them in ascending order, so that two threads cannot deadlock.
class ShardLock {
 public:
  ShardLock(Shard* shards, ShardMask mask) : shards_(shards), mask_(mask) {
    for (ShardMask rest = mask_; rest != 0; rest &= rest - 1) shards_[std::countr_zero(rest)].mutex.lock();
  }
  ~ShardLock() {
    for (ShardMask rest = mask_; rest != 0; rest &= rest - 1) shards_[std::countr_zero(rest)].mutex.unlock();
  }
  ShardLock(const ShardLock&) = delete;
  ShardLock& operator=(const ShardLock&) = delete;

 private:
  Shard* shards_;
  ShardMask mask_;
};

}  // namespace muster
