#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "muster/store/store.h"

namespace muster {

using ClientId = uint64_t;
using RequestId = uint64_t;

/// Sent on the wire: append only.
enum class Operation : uint8_t {
  kSet = 1, kGet = 2, kCompareSet = 3, kAdd = 4, kCheck = 5, kWait = 6, kDelete = 7, kNumKeys = 8, kAppend = 9,
  kMultiGet = 10, kMultiSet = 11, kQueuePush = 12, kQueuePop = 13, kQueueLength = 14, kListKeys = 15, kBarrier = 16,
  kCancel = 17,  ///< of the request `id`
};

/// One operation, whatever dialect it came in. Which fields count depends on the operation.
struct Request {
  Operation operation{};
  RequestId id = 0;            ///< the client's own number for it; the reply carries it
  std::vector<Key> keys;
  std::vector<Bytes> values;   ///< set, append, push: one; compare_set: expected, desired; multi_set: one per key
  int64_t number = 0;          ///< add: the amount; barrier: the count
};

struct Reply {
  ClientId client = 0;
  RequestId id = 0;
  Result<> status{};           ///< an error, or the fields below
  std::vector<Bytes> values;
  std::vector<Key> keys;       ///< list_keys
  int64_t number = 0;          ///< add, num_keys, queue_length; check and delete: 0 or 1
};
using Replies = std::vector<Reply>;

/// The store as a state machine: it knows no socket, no thread and no clock, so that dialects, the proxy, the memory
/// store and the simulator share it. A request that must wait gives no reply yet; the reply comes out of the later
/// apply() that releases it. Waiters are indexed by key and by client: a client that leaves costs what it waits for.
/// Not thread-safe.
class StoreState {
 public:
  StoreState();
  ~StoreState();
  Replies apply(const Request& request, ClientId client);
  /// The client is gone: its waits are forgotten.
  void drop(ClientId client);
  size_t waiters() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster
