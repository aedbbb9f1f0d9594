#pragma once

#include <cstdint>
#include <memory>
#include <optional>
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

/// One operation, from a client of either protocol. The operation decides which fields are used.
struct Request {
  StoreOperation operation{};
  RequestId id = 0;           ///< the client's own number for the request; the reply has it too
  std::vector<Key> keys;      ///< list_keys: the prefix; num_keys: a prefix, or no key to count all keys
  std::vector<Bytes> values;  ///< set, append, push: one; compare_set: expected, desired; multi_set: one per key
  int64_t number = 0;         ///< add: the amount; barrier: the count
  /// get, multi_get, queue_pop: reply at once. A missing value is then empty, as in PyTorch's protocol. A pop from an
  /// empty queue gives no value and number 0.
  bool immediate = false;
  /// get, multi_get, wait: the client wants leases of the keys that it reads (lease.h). set: it wants a lease of the
  /// key if the key is new.
  bool lease = false;
  uint32_t weight = 1;  ///< barrier: the number of arrivals; withdraw: the number to take back
};

struct Reply {
  ClientId client = 0;
  RequestId id = 0;
  Result<> status{};  ///< if this is an error, the fields below are not used
  std::vector<Bytes> values;
  std::vector<Key> keys;  ///< list_keys, in any order
  /// add: the sum; num_keys, queue_length: the number; check, delete: 0 or 1; queue_pop: the length before the pop;
  /// barrier: how many of the request's arrivals are released (the others go on waiting); withdraw: how many arrivals
  /// were taken back
  int64_t number = 0;
  bool leased = false;   ///< the client gets leases of all keys of the request
  bool recall = false;   ///< not an answer: the client must release its leases of `keys`
  uint64_t granted = 0;  ///< if leased: the number of revocations at the grant; not sent
};
using Replies = std::vector<Reply>;
inline Reply number_reply(int64_t number) {
  Reply reply;
  reply.number = number;
  return reply;
}

/// Checks the numbers of keys and values and the limits above. kInvalidArgument or kResourceExhausted.
Result<> validate(const Request& request);

/// For messages: "get(\"a\")", "wait(\"a\", \"b\" and 3 more)".
std::string describe(const Request& request);

// Errors that all stores report with the same text. `where` names the store.
Error timed_out(const Request& request, const std::string& where);
/// Returns the reply, or the error in its status. Returns timed_out() if there is no reply, or if that error is
/// kAborted: a call cancels its request only at its deadline.
Result<Reply> outcome(std::optional<Reply> reply, const Request& request, const std::string& where);
tl::unexpected<Error> cancelled();  ///< kAborted
tl::unexpected<Error> barrier_mismatch(const Key& key, int64_t count, int64_t waiting, int64_t their_count);
tl::unexpected<Error> not_a_number(const Key& key);
tl::unexpected<Error> add_overflow(const Key& key, int64_t amount);
/// Adds to a counter, which is decimal text. An empty value counts as 0. Fails with one of the two errors above.
Result<int64_t> add_to_counter(const Key& key, ByteView value, int64_t amount);

/// True if the operation looks at every key of the store: list_keys, and num_keys with a prefix.
bool is_scan(const Request& request);

/// A scan runs in steps, so that a large store serves other requests in between. See StoreState::scan().
struct Scan {
  Scan(Request scanned, ClientId client) : request(std::move(scanned)), reply{client, request.id} {}
  Request request;
  Reply reply;
  unsigned shard = 0;              ///< where the next step begins
  size_t bucket = 0, buckets = 0;  ///< position in the shard's table, and its size
  size_t listed = 0;               ///< keys of the reply from earlier shards
  int64_t counted = 0;             ///< the reply's number from earlier shards
};

struct DeferredRequest;

/// The store as a state machine. It knows no socket, thread or clock. The server, the memory store, the file store and
/// the simulator share it. A request that must wait gets no reply at first. The later apply() that releases it returns
/// its reply. The reply to a request comes before the replies to the waiters that the request releases. Waiters are
/// released in the order of their arrival at the key. Waiters are indexed by key and by client, so removing a client
/// takes time only for its own waits.
///
/// As in torch's stores, a queue is not a key. num_keys, list_keys and delete_key ignore queues. check and wait see a
/// queue while it has items. A push releases only the oldest waiter. A barrier is not a key either. An arrival that is
/// canceled or dropped is withdrawn. An arrival whose count differs from that of the waiting arrivals fails with
/// kMismatch. kCancel ends a waiting request: the request gets kAborted. kCancel does nothing if the request was
/// already answered. A client may have kMaxWaitsPerClient waiting requests in each shard.
///
/// A client that asks for leases gets them for keys that it reads or creates (lease.h). A change of a leased key sends
/// recalls to the holders, and waits until the leases are given back or revoked.
///
/// Thread-safe. Each shard has a lock. A request holds the locks of the shards of all its keys, and of all keys of the
/// waiters that it releases. So every operation except a scan() of several steps is atomic, for any number of shards.
class StoreState {
 public:
  explicit StoreState(unsigned shards = 1);
  ~StoreState();
  Replies apply(Request request, ClientId client);
  /// The same, but appends the replies to `out`.
  void apply(Request&& request, ClientId client, Replies& out);
  /// Call this when a client has left. Removes its waiting requests, except changes with kNoTorchReply, which are still
  /// carried out.
  void drop(ClientId client);
  /// Ends the client's leases (lease.h). Appends the replies to requests that waited for this. Returns the number of
  /// revocations. A lease that is still on its way to the client has ended too if its Reply::granted is below this
  /// number.
  uint64_t revoke(ClientId client, Replies& out);
  /// Takes the next step of a valid scan. True if it was the last step, so the reply is complete. One step covers a
  /// store of up to about 4,000 keys, so the scan of such a store is atomic. The scan of a larger store reports every
  /// key that exists during the whole scan. A key that is set or deleted during the scan may be reported or not.
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
