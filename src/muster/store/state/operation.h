#pragma once

#include <cstddef>
#include <cstdint>

namespace muster {

/// These numbers are sent on the wire and written to file stores. So never change a number; only append.
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
  kCancel = 17,  ///< ends the request `id`
  kStat = 18,    ///< statistics of the store, see stat.h
  // Between a proxy and its server only:
  kWithdraw = 21,  ///< takes back up to `weight` waiting arrivals of the barrier request `number` at the key
  kRelease = 22,   ///< the client gives back its leases of the keys; no reply
};

enum OperationFlags : uint8_t {
  kReadOnly = 1,       ///< changes nothing
  kReadsKeys = 2,      ///< reads values or the existence of keys, which may be leased
  kChangesKeys = 4,    ///< changes values of keys, which may be leased
  kMayRelease = 8,     ///< may release waiters
  kNoTorchReply = 16,  ///< has no reply in PyTorch's protocol: a client may leave as soon as it has sent the request,
                       ///< which is carried out nonetheless
  kTakesBack = 32      ///< frees resources, so even a full proxy accepts it
};

struct OperationInfo {
  static constexpr uint8_t kAny = 255;  ///< keys: any number; values: one per key
  const char* name = "unknown operation";
  uint8_t keys = 0, values = 0;
  uint8_t flags = 0;
};

/// Indexed by the operation's number.
inline constexpr OperationInfo kOperations[] = {
    {},
    {"set", 1, 1, kChangesKeys | kMayRelease | kNoTorchReply},
    {"get", 1, 0, kReadOnly | kReadsKeys},
    {"compare_set", 1, 2, kChangesKeys | kMayRelease},
    {"add", 1, 0, kChangesKeys | kMayRelease},
    {"check", OperationInfo::kAny, 0, kReadOnly | kReadsKeys},
    {"wait", OperationInfo::kAny, 0, kReadOnly | kReadsKeys},
    {"delete_key", 1, 0, kChangesKeys},
    {"num_keys", 0, 0, kReadOnly},  // or 1 key, the prefix
    {"append", 1, 1, kChangesKeys | kMayRelease | kNoTorchReply},
    {"multi_get", OperationInfo::kAny, 0, kReadOnly | kReadsKeys},
    {"multi_set", OperationInfo::kAny, OperationInfo::kAny, kChangesKeys | kMayRelease | kNoTorchReply},
    {"queue_push", 1, 1, kMayRelease | kNoTorchReply},
    {"queue_pop", 1, 0},
    {"queue_length", 1, 0, kReadOnly},
    {"list_keys", 1, 0, kReadOnly},
    {"barrier", 1, 0},
    {"cancel", 0, 0, kTakesBack},
    {"stat", 0, 0, kReadOnly},
    {},
    {},
    {"withdraw", 1, 0, kTakesBack},
    {"release", OperationInfo::kAny, 0, kTakesBack},
};

constexpr const OperationInfo& info(StoreOperation operation) {
  const auto number = static_cast<size_t>(operation);
  return kOperations[number < sizeof kOperations / sizeof *kOperations ? number : 0];
}
constexpr bool has(StoreOperation operation, OperationFlags flag) { return (info(operation).flags & flag) != 0; }
/// "set", "multi_get", ...
constexpr const char* name(StoreOperation operation) { return info(operation).name; }

}  // namespace muster
