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

/// The tables of StoreState, private to it. Keys are spread over shards. All data of a key is in its shard, and the
/// shard's mutex guards it. A ShardMask is a set of shards: bit i stands for shard i.
using ShardMask = uint32_t;
inline constexpr unsigned kMaxShards = 32;

struct Waiter;

/// Waiters in the order of their arrival. The list is intrusive, so removal costs constant time. A waiter is in one
/// list at a time.
struct WaitList {
  Waiter* first = nullptr;
  Waiter* last = nullptr;
  bool empty() const { return first == nullptr; }
  void push_back(Waiter& waiter);
  void remove(Waiter& waiter);
};

/// The data that a key may have besides its value.
struct KeyExtras {
  std::list<Bytes> queue;
  WaitList waiting;  ///< requests that wait for the key, or for an item of the queue
  WaitList arrived;  ///< callers that wait at the barrier
  int64_t arrivals = 0, barrier_count = 0;
  /// The shards of all keys of the waiters. While there are waiters, it may contain shards that no waiter uses any
  /// more.
  ShardMask shards = 0;
};

struct Entry {
  std::optional<Bytes> value;
  std::unique_ptr<KeyExtras> extras;  ///< null for most keys

  bool has_queue() const { return extras && !extras->queue.empty(); }
  KeyExtras& ensure_extras() {
    if (!extras) extras = std::make_unique<KeyExtras>();
    return *extras;
  }
};
using Slot = std::pair<const Key, Entry>;  ///< its address stays the same while the entry is not empty

/// A request that waits. It is stored in its home shard, which is the lowest shard of its keys. It is listed in the
/// shard of the key that it waits for. A thread that changes it must hold the locks of all shards of its keys.
struct Waiter {
  ClientId client = 0;
  Request request{};
  ShardMask shards = 0;
  size_t cursor = 0;  ///< index of the missing key that lists it; the keys before it existed when checked
  Slot* at = nullptr;
  Waiter* previous = nullptr;
  Waiter* next = nullptr;
  Waiter* previous_of_client = nullptr;
  Waiter* next_of_client = nullptr;

  bool at_barrier() const { return request.operation == StoreOperation::kBarrier; }
};

/// A change that waits until leases are given back. It counts as one of its client's waits and can be canceled.
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
  std::unordered_map<Key, Entry> entries;  // never holds empty entries
  size_t keys = 0, queues = 0;             // number of entries with a value, and with a queue
  size_t multi_shard_waiters = 0;          // number of waiters listed here that also have keys in other shards

  // A client's waiters whose home is this shard, and its changes that wait in this shard until leases are given back.
  struct ClientWaits {
    Waiter* first = nullptr;
    size_t count = 0;  // number of waiters and deferred changes
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
  /// Lets a change wait until the key has no leases. Errors as in register_waiter().
  Result<> defer(const Key& key, Request&& request, ClientId client);
  /// Removes a deferred change. False if there is none.
  bool forget_deferred(ClientId client, RequestId id);
  /// Removes the client's deferred changes, except those with kNoTorchReply, which must be carried out.
  void drop_deferred(ClientId client);
  /// Moves the changes that were deferred at the key to `out`.
  void take_deferred(const Key& key, std::vector<DeferredRequest>& out);
  /// Removes the entry if it is empty.
  void tidy(Slot& slot);

  /// Makes this shard the waiter's home. kResourceExhausted if the client has kMaxWaitsPerClient waits here, kProtocol
  /// if a request with the same number already waits.
  Result<Waiter*> register_waiter(Request&& request, ClientId client, ShardMask shards);
  /// Destroys the waiter, which must not be in a list any more.
  void unregister_waiter(Waiter& waiter);
  /// list() adds the waiter to the list of a key of this shard. unlist() removes it from that list.
  void list(Waiter& waiter, Slot& slot);
  void unlist(Waiter& waiter);

 private:
  Result<> may_wait(ClientId client, RequestId id) const;
  void uncount(ClientId client);
};

}  // namespace muster
