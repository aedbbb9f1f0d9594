#include <fmt/format.h>

#include <algorithm>

#include "muster/store/state/state.h"

namespace muster {
namespace {

// How many keys and values an operation takes; kAny for "as many as there are".
constexpr size_t kAny = SIZE_MAX;
struct Operands {
  size_t keys, values;
};

Operands operands_of(StoreOperation operation, size_t keys) {
  switch (operation) {
    case StoreOperation::kSet:
    case StoreOperation::kAppend:
    case StoreOperation::kQueuePush:
      return {1, 1};
    case StoreOperation::kCompareSet:
      return {1, 2};
    case StoreOperation::kGet:
    case StoreOperation::kAdd:
    case StoreOperation::kDelete:
    case StoreOperation::kQueuePop:
    case StoreOperation::kQueueLength:
    case StoreOperation::kListKeys:
    case StoreOperation::kBarrier:
    case StoreOperation::kWithdraw:
      return {1, 0};
    case StoreOperation::kCheck:
    case StoreOperation::kWait:
    case StoreOperation::kMultiGet:
    case StoreOperation::kRelease:
      return {kAny, 0};
    case StoreOperation::kMultiSet:
      return {kAny, kAny};
    case StoreOperation::kNumKeys:
      return {std::min<size_t>(keys, 1), 0};
    case StoreOperation::kCancel:
    case StoreOperation::kStat:
      return {0, 0};
  }
  return {0, 0};
}

}  // namespace

const char* name(StoreOperation operation) {
  switch (operation) {
    case StoreOperation::kSet:
      return "set";
    case StoreOperation::kGet:
      return "get";
    case StoreOperation::kCompareSet:
      return "compare_set";
    case StoreOperation::kAdd:
      return "add";
    case StoreOperation::kCheck:
      return "check";
    case StoreOperation::kWait:
      return "wait";
    case StoreOperation::kDelete:
      return "delete_key";
    case StoreOperation::kNumKeys:
      return "num_keys";
    case StoreOperation::kAppend:
      return "append";
    case StoreOperation::kMultiGet:
      return "multi_get";
    case StoreOperation::kMultiSet:
      return "multi_set";
    case StoreOperation::kQueuePush:
      return "queue_push";
    case StoreOperation::kQueuePop:
      return "queue_pop";
    case StoreOperation::kQueueLength:
      return "queue_length";
    case StoreOperation::kListKeys:
      return "list_keys";
    case StoreOperation::kBarrier:
      return "barrier";
    case StoreOperation::kCancel:
      return "cancel";
    case StoreOperation::kWithdraw:
      return "withdraw";
    case StoreOperation::kRelease:
      return "release";
    case StoreOperation::kStat:
      return "stat";
  }
  return "unknown operation";
}

Result<> validate(const Request& request) {
  const char* what = name(request.operation);
  const Operands operands = operands_of(request.operation, request.keys.size());
  const size_t values = operands.values == kAny ? request.keys.size() : operands.values;
  if (operands.keys != kAny && request.keys.size() != operands.keys) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{} takes {} key(s) and was given {}", what, operands.keys, request.keys.size()));
  }
  if (request.values.size() != values) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("{} of {} key(s) takes {} value(s) and was given {}", what,
                                                         request.keys.size(), values, request.values.size()));
  }
  if (request.keys.size() > kMaxKeysPerRequest) {
    return fail(ErrorCode::kResourceExhausted, fmt::format("{} was given {} keys, at most {} go into one request", what,
                                                           request.keys.size(), kMaxKeysPerRequest));
  }
  if (request.weight == 0) return fail(ErrorCode::kInvalidArgument, fmt::format("{} was given a weight of 0", what));
  for (const Key& key : request.keys) {
    if (key.size() <= kMaxKeyBytes) continue;
    return fail(ErrorCode::kResourceExhausted,
                fmt::format("{} was given a key of {} bytes, the limit is {}", what, key.size(), kMaxKeyBytes));
  }
  for (const Bytes& value : request.values) {
    if (value.size() <= kMaxValueBytes) continue;
    return fail(ErrorCode::kResourceExhausted,
                fmt::format("{} was given a value of {} bytes, the limit is {}", what, value.size(), kMaxValueBytes));
  }
  return {};
}

}  // namespace muster
