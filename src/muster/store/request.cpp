#include <fmt/format.h>

#include <algorithm>

#include "muster/store/state.h"

namespace muster {
namespace {

// How many keys and values an operation takes; kAny for "as many as there are".
constexpr size_t kAny = SIZE_MAX;
struct Shape {
  size_t keys, values;
};

Shape shape_of(Operation operation, size_t keys) {
  switch (operation) {
    case Operation::kSet:
    case Operation::kAppend:
    case Operation::kQueuePush:
      return {1, 1};
    case Operation::kCompareSet:
      return {1, 2};
    case Operation::kGet:
    case Operation::kAdd:
    case Operation::kDelete:
    case Operation::kQueuePop:
    case Operation::kQueueLength:
    case Operation::kListKeys:
    case Operation::kBarrier:
    case Operation::kWithdraw:
      return {1, 0};
    case Operation::kCheck:
    case Operation::kWait:
    case Operation::kMultiGet:
    case Operation::kRelease:
      return {kAny, 0};
    case Operation::kMultiSet:
      return {kAny, kAny};
    case Operation::kNumKeys:
      return {std::min<size_t>(keys, 1), 0};
    case Operation::kCancel:
    case Operation::kStat:
      return {0, 0};
  }
  return {0, 0};
}

}  // namespace

const char* name(Operation operation) {
  switch (operation) {
    case Operation::kSet:
      return "set";
    case Operation::kGet:
      return "get";
    case Operation::kCompareSet:
      return "compare_set";
    case Operation::kAdd:
      return "add";
    case Operation::kCheck:
      return "check";
    case Operation::kWait:
      return "wait";
    case Operation::kDelete:
      return "delete_key";
    case Operation::kNumKeys:
      return "num_keys";
    case Operation::kAppend:
      return "append";
    case Operation::kMultiGet:
      return "multi_get";
    case Operation::kMultiSet:
      return "multi_set";
    case Operation::kQueuePush:
      return "queue_push";
    case Operation::kQueuePop:
      return "queue_pop";
    case Operation::kQueueLength:
      return "queue_length";
    case Operation::kListKeys:
      return "list_keys";
    case Operation::kBarrier:
      return "barrier";
    case Operation::kCancel:
      return "cancel";
    case Operation::kWithdraw:
      return "withdraw";
    case Operation::kRelease:
      return "release";
    case Operation::kStat:
      return "stat";
  }
  return "unknown operation";
}

Result<> validate(const Request& request) {
  const char* what = name(request.operation);
  const Shape shape = shape_of(request.operation, request.keys.size());
  const size_t values = shape.values == kAny ? request.keys.size() : shape.values;
  if (shape.keys != kAny && request.keys.size() != shape.keys) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{} takes {} key(s) and was given {}", what, shape.keys, request.keys.size()));
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
