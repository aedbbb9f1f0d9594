#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "muster/store/state/lease.h"
#include "muster/store/state/state.h"

namespace muster {

/// The tables of StoreState, private to it. Keys are spread over shards. Everything about a key is in its shard,
/// guarded by the shard's mutex. A set of shards is a bit mask.
using ShardMask = uint32_t;
inline constexpr unsigned kMaxShards = 32;

struct Waiter;

/// Waiters in the order of their arrival. A waiter is in one list at a time, and can leave at constant cost.
struct WaitList {
  Waiter* first = nullptr;
  Waiter* last = nullptr;
  bool empty() const { return first == nullptr; }
  void push_back(Waiter& waiter);
  void remove(Waiter& waiter);
};

/// What a key may have besides its value.
struct KeyExtras {
  std::list<Bytes> queue;
  WaitList waiting;  ///< for the key, or for an item of the queue
  WaitList arrived;  ///< at the barrier
  int64_t arrivals = 0, barrier_count = 0;
  /// All shards of the waiters' keys. May name too many as long as there are waiters.
  ShardMask shards = 0;
};

struct Entry {
  std::optional<Bytes> value;
  std::unique_ptr<KeyExtras> extras;  ///< most keys have none

  bool has_queue() const { return extras && !extras->queue.empty(); }
  KeyExtras& ensure_extras() {
    if (!extras) extras = std::make_unique<KeyExtras>();
    return *extras;
  }
};
using Slot = std::pair<const Key, Entry>;  ///< its address stays the same while it is not empty

/// A request that waits. It is stored in its home, the first shard of its keys, and listed in the shard of the key that
/// it waits for. A thread that changes it holds the locks of all shards of its keys.
struct Waiter {
  ClientId client = 0;
  Request request{};
  ShardMask shards = 0;
  size_t cursor = 0;  ///< the missing key that it is listed under; the keys before it existed
  Slot* at = nullptr;
  Waiter* previous = nullptr;
  Waiter* next = nullptr;
  Waiter* previous_of_client = nullptr;
  Waiter* next_of_client = nullptr;

  bool at_barrier() const { return request.operation == StoreOperation::kBarrier; }
};

/// A change that waits until leases are given back. It counts as one of its client's waits and can be cancelled.
struct DeferredRequest {
  Request request;
  ClientId client;
};

/// The position of a DeferredRequest in Shard::deferred.
struct DeferredPosition {
  Key key;
  std::list<DeferredRequest>::iterator at;
};

struct WaiterName {
  ClientId client;
  RequestId id;
  friend bool operator==(const WaiterName&, const WaiterName&) = default;
};
struct HashWaiterName {
  size_t operator()(const WaiterName& name) const {
    return std::hash<uint64_t>()(name.client * 0x9E3779B97F4A7C15 ^ name.id * 0xC2B2AE3D27D4EB4F);
  }
};

struct alignas(64) Shard {
  std::mutex mutex;
  std::unordered_map<Key, Entry> entries;  // no empty ones
  size_t keys = 0, queues = 0;             // entries with a value, with a queue
  size_t multi_shard_waiters = 0;          // waiters listed here that have keys in other shards too

  // A client's waiters whose home is this shard, and its changes that wait here for leases.
  struct ClientWaits {
    Waiter* first = nullptr;
    size_t count = 0;  // of both
    std::unordered_map<RequestId, DeferredPosition> deferred;
  };
  std::unordered_map<WaiterName, Waiter, HashWaiterName> waiters;
  std::unordered_map<ClientId, ClientWaits> by_client;

  LeaseTable leases;
  std::unordered_map<Key, std::list<DeferredRequest>> deferred;

  Entry* find(const Key& key);
  void set(Slot& slot, Bytes value);
  bool erase(const Key& key);
  Bytes pop(Slot& slot);
  /// Lets a change wait until the key has no leases. kResourceExhausted or kProtocol as register_waiter().
  Result<> defer(const Key& key, Request&& request, ClientId client);
  /// Forgets a change that waits. False if there is none.
  bool forget_deferred(ClientId client, RequestId id);
  /// Forgets the client's changes, but for those with kNoTorchReply.
  void drop_deferred(ClientId client);
  /// Moves out what waited until the key was free.
  void take_deferred(const Key& key, std::vector<DeferredRequest>& out);
  /// Forgets an entry that holds nothing any more.
  void tidy(Slot& slot);

  /// Makes this the waiter's home. kResourceExhausted or kProtocol as StoreState says.
  Result<Waiter*> register_waiter(Request&& request, ClientId client, ShardMask shards);
  /// The waiter is in no list any more.
  void unregister_waiter(Waiter& waiter);
  /// Lists the waiter under a key of this shard, or takes it off that list.
  void list(Waiter& waiter, Slot& slot);
  void unlist(Waiter& waiter);

 private:
  Result<> may_wait(ClientId client, RequestId id) const;
  void uncount(ClientId client);
};

}  // namespace muster
