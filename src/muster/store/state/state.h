#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "muster/store/state/operation.h"
#include "muster/store/store.h"

namespace muster {

using ClientId = uint64_t;
using RequestId = uint64_t;

inline constexpr size_t kMaxKeyBytes = 64 << 10;
inline constexpr size_t kMaxValueBytes = size_t{1} << 30;
inline constexpr size_t kMaxKeysPerRequest = 1 << 20;
inline constexpr size_t kMaxWaitsPerClient = 1 << 16;

/// One operation, from a client of either protocol. The operation says which fields matter.
struct Request {
  StoreOperation operation{};
  RequestId id = 0;           ///< the client's own number for it; the reply carries it
  std::vector<Key> keys;      ///< list_keys: the prefix; num_keys: a prefix, or none for all
  std::vector<Bytes> values;  ///< set, append, push: one; compare_set: expected, desired; multi_set: one per key
  int64_t number = 0;         ///< add: the amount; barrier: the count
  /// get, multi_get, queue_pop: reply at once. A missing value is empty, as in PyTorch's protocol; a pop from an empty
  /// queue gives no value and number 0.
  bool immediate = false;
  /// get, multi_get, wait: the client wants leases of what it reads, see lease.h; set: of a key that is new.
  bool lease = false;
  uint32_t weight = 1;  ///< barrier: the number of arrivals; withdraw: the number to take back
};

struct Reply {
  ClientId client = 0;
  RequestId id = 0;
  Result<> status{};  ///< an error; otherwise the fields below count
  std::vector<Bytes> values;
  std::vector<Key> keys;  ///< list_keys, in any order
  /// add: the sum; num_keys, queue_length: the number; check, delete: 0 or 1; queue_pop: the length before the pop;
  /// barrier: how many of its arrivals are released (the others go on waiting); withdraw: how many were taken back
  int64_t number = 0;
  bool leased = false;   ///< the client gets leases of all the keys that it asked for
  bool recall = false;   ///< not an answer: the client must release its leases of `keys`
  uint64_t granted = 0;  ///< if leased: the number of revocations at that time; not sent
};
using Replies = std::vector<Reply>;
inline Reply number_reply(int64_t number) {
  Reply reply;
  reply.number = number;
  return reply;
}

/// Checks the numbers of keys and values and the limits above. kInvalidArgument or kResourceExhausted.
Result<> validate(const Request& request);

// The errors that every kind of store reports alike.
tl::unexpected<Error> barrier_mismatch(const Key& key, int64_t count, int64_t waiting, int64_t their_count);
tl::unexpected<Error> not_a_number(const Key& key);
tl::unexpected<Error> add_overflow(const Key& key, int64_t amount);

/// Whether the operation looks at every key of the store: list_keys, and num_keys with a prefix.
bool is_scan(const Request& request);

/// A scan goes in steps, so that a large store serves other requests in between. See StoreState::scan().
struct Scan {
  Scan(Request scanned, ClientId client);
  Request request;
  Reply reply;
  unsigned shard = 0;              ///< where the next step begins
  size_t bucket = 0, buckets = 0;  ///< of the shard's table
  size_t listed = 0;               ///< keys of the reply from earlier shards
  int64_t counted = 0;             ///< the reply's number from earlier shards
};

struct DeferredRequest;

/// The store as a state machine. It knows no socket, thread or clock; the server, the memory store, the file store and
/// the simulator share it. A request that must wait has no reply yet: a later apply() that releases it returns the
/// reply. A reply comes before those of the waiters that the request released; these come in the order of their arrival
/// at the key. Waiters are indexed by key and by client, so a client that leaves costs time for its own waits only.
///
/// As in torch's stores, a queue is not a key. num_keys, list_keys and delete_key ignore queues; check and wait see a
/// queue while it has items; a push releases the oldest waiter only. A barrier is not a key either. An arrival that is
/// cancelled or dropped is withdrawn. An arrival with another count than those that wait is kMismatch. kCancel answers
/// the request that it ends with kAborted, and does nothing if that was answered already. A client may have
/// kMaxWaitsPerClient waiting requests in each shard.
///
/// A client that asks for leases gets them for keys that it reads or creates (lease.h). A change of a leased key waits
/// until the leases are given back or revoked; the holders get recalls.
///
/// Thread-safe. Each shard has a lock. A request holds the locks of all its keys, and of all keys of the waiters that
/// it releases. So every operation but a long scan() is atomic, whatever the number of shards.
class StoreState {
 public:
  explicit StoreState(unsigned shards = 1);
  ~StoreState();
  Replies apply(Request request, ClientId client);
  /// The same; appends the replies to `out`.
  void apply(Request&& request, ClientId client, Replies& out);
  /// The client has left: its waiting requests are forgotten, but for changes with kNoTorchReply.
  void drop(ClientId client);
  /// The client's leases have ended (lease.h). Appends the replies to requests that waited for that. Returns the number
  /// of revocations: leases granted before so many (Reply::granted) that are still on their way have ended too.
  uint64_t revoke(ClientId client, Replies& out);
  /// Takes the next step of a valid scan. True if it was the last one: the reply is complete. One step covers a store
  /// of up to about 4,000 keys, so its scan is atomic. The scan of a larger store reports every key that exists all the
  /// time; a key that is set or deleted meanwhile may be reported or not.
  bool scan(Scan& scan) const;
  size_t waiters() const;
  /// Keys, queues and waiters.
  StoreStat stat() const;

 private:
  struct Impl;
  void cancel(RequestId id, ClientId client, Replies& out);
  void release_leases(const Request& request, ClientId client, Replies& out);
  void retry(std::vector<DeferredRequest> held, Replies& out);
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster
