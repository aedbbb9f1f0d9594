#include <fmt/format.h>

#include <algorithm>

#include "muster/store/state/state.h"

namespace muster {

Result<> validate(const Request& request) {
  const auto& [what, known_keys, known_values, flags] = info(request.operation);
  size_t keys = known_keys == OperationInfo::kAny ? request.keys.size() : known_keys;
  if (request.operation == StoreOperation::kNumKeys) keys = std::min<size_t>(request.keys.size(), 1);
  const size_t values = known_values == OperationInfo::kAny ? request.keys.size() : known_values;
  if (request.keys.size() != keys) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{} takes {} key(s), got {}", what, keys, request.keys.size()));
  }
  if (request.values.size() != values) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{} of {} key(s) takes {} value(s), got {}", what, keys, values, request.values.size()));
  }
  if (request.operation == StoreOperation::kBarrier && request.number < 1) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("the count of barrier \"{}\" must be > 0, got {}", request.keys[0], request.number));
  }
  if (request.keys.size() > kMaxKeysPerRequest) {
    return fail(ErrorCode::kResourceExhausted,
                fmt::format("{} got {} keys, the limit is {}", what, request.keys.size(), kMaxKeysPerRequest));
  }
  if (request.weight == 0) return fail(ErrorCode::kInvalidArgument, fmt::format("{} got a weight of 0", what));
  for (const Key& key : request.keys) {
    if (key.size() <= kMaxKeyBytes) continue;
    return fail(ErrorCode::kResourceExhausted,
                fmt::format("{} got a key of {} bytes, the limit is {}", what, key.size(), kMaxKeyBytes));
  }
  for (const Bytes& value : request.values) {
    if (value.size() <= kMaxValueBytes) continue;
    return fail(ErrorCode::kResourceExhausted,
                fmt::format("{} got a value of {} bytes, the limit is {}", what, value.size(), kMaxValueBytes));
  }
  return {};
}

tl::unexpected<Error> barrier_mismatch(const Key& key, int64_t count, int64_t waiting, int64_t their_count) {
  return fail(ErrorCode::kMismatch, fmt::format("barrier \"{}\" got a count of {}, but {} caller(s) wait there for {}",
                                                key, count, waiting, their_count));
}

tl::unexpected<Error> not_a_number(const Key& key) {
  return fail(ErrorCode::kInvalidArgument, fmt::format("add to key \"{}\": its value is not a decimal number", key));
}

tl::unexpected<Error> add_overflow(const Key& key, int64_t amount) {
  return fail(ErrorCode::kInvalidArgument, fmt::format("adding {} to key \"{}\" would overflow 64 bits", amount, key));
}

}  // namespace muster
