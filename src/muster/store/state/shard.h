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

/// The tables of StoreState, private to it. Keys are spread over shards; all that concerns a key is in its own shard
/// and guarded by that shard's mutex. A set of shards is a bit mask.
using ShardMask = uint32_t;
inline constexpr unsigned kMaxShards = 32;

struct Waiter;

/// Waiters in the order in which they came here. Each is in one list at a time, and any one can leave cheaply.
struct WaitList {
  Waiter* first = nullptr;
  Waiter* last = nullptr;
  bool empty() const { return first == nullptr; }
  void push_back(Waiter& waiter);
  void remove(Waiter& waiter);
};

/// What may stand beside a key's value.
struct KeyExtras {
  std::list<Bytes> queue;
  WaitList waiting;  ///< for the key, or for something in the queue
  WaitList arrived;  ///< at the barrier
  int64_t arrivals = 0, barrier_count = 0;
  /// The shards that those who wait here are concerned with. May name too many until nobody waits.
  ShardMask shards = 0;
};

struct Entry {
  std::optional<Bytes> value;
  std::unique_ptr<KeyExtras> place;  ///< most keys have none

  bool has_queue() const { return place && !place->queue.empty(); }
  KeyExtras& beside() {
    if (!place) place = std::make_unique<KeyExtras>();
    return *place;
  }
};
using Slot = std::pair<const Key, Entry>;  ///< stays where it is as long as it holds anything

/// A request that waits. It belongs to its home, the first shard of its keys, and is listed in the shard of the key
/// that it waits for: whoever changes it holds all the shards of its keys.
struct Waiter {
  ClientId client = 0;
  Request request{};
  ShardMask shards = 0;
  size_t cursor = 0;  ///< the missing key that it is listed under; those before it were seen
  Slot* at = nullptr;
  Waiter* previous = nullptr;
  Waiter* next = nullptr;
  Waiter* previous_of_client = nullptr;
  Waiter* next_of_client = nullptr;

  bool at_barrier() const { return request.operation == StoreOperation::kBarrier; }
};

/// A change that waits until leases are given back. It counts as one of its client's waits, and can be cancelled.
struct HeldRequest {
  Request request;
  ClientId client;
};

/// Where in Shard::held one is.
struct HeldPlace {
  Key key;
  std::list<HeldRequest>::iterator at;
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
  std::unordered_map<Key, Entry> entries;  // none that holds nothing
  size_t keys = 0, queues = 0;             // how many of the entries have a value, a queue
  size_t wide = 0;                         // waiters listed here that concern other shards too

  // Of the waiters whose home is here, and of the changes that wait here for leases.
  struct ClientWaits {
    Waiter* first = nullptr;
    size_t count = 0;  // of both
    std::unordered_map<RequestId, HeldPlace> held;
  };
  std::unordered_map<WaiterName, Waiter, HashWaiterName> waiters;
  std::unordered_map<ClientId, ClientWaits> by_client;

  LeaseTable leases;
  std::unordered_map<Key, std::list<HeldRequest>> held;

  Entry* find(const Key& key);
  void set(Slot& slot, Bytes value);
  bool erase(const Key& key);
  Bytes pop(Slot& slot);
  /// Lets a change wait until the key is free. kResourceExhausted or kProtocol as register_waiter().
  Result<> hold(const Key& key, Request&& request, ClientId client);
  /// Forgets a change that waits. False if there is none.
  bool forget_held(ClientId client, RequestId id);
  /// Forgets the client's changes that would be answered (is_answered()).
  void drop_held(ClientId client);
  /// Moves out what waited until the key was free.
  void take_held(const Key& key, std::vector<HeldRequest>& out);
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
