#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "muster/store/store.h"

namespace muster {

using ClientId = uint64_t;
using RequestId = uint64_t;

/// Sent on the wire and written to file stores: append only.
enum class StoreOperation : uint8_t {
  kSet = 1,
  kGet = 2,
  kCompareSet = 3,
  kAdd = 4,
  kCheck = 5,
  kWait = 6,
  kDelete = 7,
  kNumKeys = 8,
  kAppend = 9,
  kMultiGet = 10,
  kMultiSet = 11,
  kQueuePush = 12,
  kQueuePop = 13,
  kQueueLength = 14,
  kListKeys = 15,
  kBarrier = 16,
  kCancel = 17,  ///< of the request `id`
  kStat = 18,    ///< what the store holds and has done, see stat.h
  // Between tiers only:
  kWithdraw = 21,  ///< takes back `weight` arrivals of the barrier request `number` at the key, as far as they wait
  kRelease = 22,   ///< the client does not use its leases of the keys any more; no reply
};
inline constexpr StoreOperation kLastOperation = StoreOperation::kRelease;
/// PyTorch's protocol has no replies to sets, appends and pushes: a client may leave as soon as it has sent one, which
/// is carried out nonetheless.
bool is_answered(StoreOperation operation);
/// "set", "multi_get", ...
const char* name(StoreOperation operation);

inline constexpr size_t kMaxKeyBytes = 64 << 10;
inline constexpr size_t kMaxValueBytes = size_t{1} << 30;
inline constexpr size_t kMaxKeysPerRequest = 1 << 20;
inline constexpr size_t kMaxWaitsPerClient = 1 << 16;

/// One operation, whatever dialect it came in. Which fields count depends on the operation.
struct Request {
  StoreOperation operation{};
  RequestId id = 0;           ///< the client's own number for it; the reply carries it
  std::vector<Key> keys;      ///< list_keys: the prefix; num_keys: a prefix, or none for all
  std::vector<Bytes> values;  ///< set, append, push: one; compare_set: expected, desired; multi_set: one per key
  int64_t number = 0;         ///< add: the amount; barrier: the count
  /// get, multi_get, queue_pop: reply at once. A missing value is empty, as torch's protocol wants it; a pop from an
  /// empty queue has no value and number 0.
  bool immediate = false;
  /// get, multi_get, wait: the client would keep what it reads, see lease.h; set: it would keep a key that is new.
  bool lease = false;
  uint32_t weight = 1;  ///< barrier: the arrivals that it stands for; withdraw: how many of them to take back
};

struct Reply {
  ClientId client = 0;
  RequestId id = 0;
  Result<> status{};  ///< an error, or the fields below
  std::vector<Bytes> values;
  std::vector<Key> keys;  ///< list_keys, sorted
  /// add: the sum; num_keys, queue_length: the number; check and delete: 0 or 1; queue_pop: the length before it;
  /// barrier: how many of its arrivals are released (the others wait on); withdraw: how many were taken back
  int64_t number = 0;
  bool leased = false;   ///< the client holds leases of all the keys that it asked for
  bool recall = false;   ///< answers nothing: the client must release its leases of `keys`
  uint64_t granted = 0;  ///< if leased: how many revocations there had been by then; not sent
};
using Replies = std::vector<Reply>;

/// Whether the request can be carried out at all: its keys and values are as many as the operation takes, and within
/// the limits above. kInvalidArgument or kResourceExhausted otherwise.
Result<> validate(const Request& request);

struct HeldRequest;

/// The store as a state machine: it knows no socket, no thread and no clock, so that the server, the memory store, the
/// file store and the simulator share it. A request that must wait gives no reply yet; the reply comes out of the later
/// apply() that releases it. Waiters are indexed by key and by client: a client that leaves costs what it waits for.
/// What is released comes after the answer to the request that released it, in the order in which it came to wait for
/// that key.
///
/// As in torch's stores, a queue stands beside the keys: num_keys, list_keys and delete_key do not see it, check and
/// wait do while it holds something, and a push releases one waiter only, the oldest. A barrier is no key either. An
/// arrival that is cancelled or dropped is withdrawn; one whose count differs from those already waiting is kMismatch.
/// kCancel answers the request that it ends with kAborted; if that has been answered already, nothing happens. A client
/// may have kMaxWaitsPerClient requests that wait, whatever for, in each shard.
///
/// A client that asks for it is granted leases of what it reads, and of keys that it makes (lease.h): until they are
/// given back or revoked, a change of such a key is held back, and those who hold leases are sent recalls.
///
/// Thread-safe. Keys are spread over shards with a lock each; a request, and whoever it releases, holds those of all
/// its keys at once, so that every operation is atomic whatever the number of shards.
class StoreState {
 public:
  explicit StoreState(unsigned shards = 1);
  ~StoreState();
  Replies apply(Request request, ClientId client);
  /// The same; appends the replies to `out`.
  void apply(Request&& request, ClientId client, Replies& out);
  /// The client is gone: what it waits for is forgotten, but for changes that are not answered (is_answered()).
  void drop(ClientId client);
  /// The client's leases have ended (lease.h); appends the replies to what waited for them. Returns how many
  /// revocations there have been: grants of fewer (Reply::granted) that are still on their way to it have ended, too.
  uint64_t revoke(ClientId client, Replies& out);
  size_t waiters() const;
  /// Keys, queues and waiters.
  StoreStat stat() const;

 private:
  struct Impl;
  void cancel(RequestId id, ClientId client, Replies& out);
  void give_back(const Request& request, ClientId client, Replies& out);
  void retry(std::vector<HeldRequest> held, Replies& out);
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster
