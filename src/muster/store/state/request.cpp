#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "muster/store/state/state.h"

namespace muster {
namespace {

const char* reason_of_timeout(StoreOperation operation) {
  switch (operation) {
    case StoreOperation::kGet:
    case StoreOperation::kMultiGet:
    case StoreOperation::kWait:
      return "timed out: no process has set the key; look for the one that should have";
    case StoreOperation::kQueuePop:
      return "timed out: no process has pushed an item";
    case StoreOperation::kBarrier:
      return "timed out: not all callers have arrived; look for the missing ones";
    default:
      return "was not answered in time; is the store's process alive and reachable?";
  }
}

}  // namespace

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

std::string describe(const Request& request) {
  constexpr size_t kShown = 4;
  std::string text = name(request.operation);
  text += '(';
  for (size_t i = 0; i < request.keys.size() && i < kShown; ++i) {
    text += fmt::format("{}\"{}\"", i == 0 ? "" : ", ", request.keys[i].substr(0, 200));
  }
  if (request.keys.size() > kShown) text += fmt::format(" and {} more", request.keys.size() - kShown);
  return text + ")";
}

Error timed_out(const Request& request, const std::string& where) {
  return {ErrorCode::kTimeout,
          fmt::format("{} at {} {}", describe(request), where, reason_of_timeout(request.operation))};
}

Result<Reply> outcome(std::optional<Reply> reply, const Request& request, const std::string& where) {
  if (!reply || (!reply->status && reply->status.error().code == ErrorCode::kAborted)) {
    return tl::unexpected(timed_out(request, where));
  }
  MUSTER_TRY(std::move(reply->status));
  return std::move(*reply);
}

tl::unexpected<Error> cancelled() { return fail(ErrorCode::kAborted, "the request was cancelled by its client"); }

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

Result<int64_t> add_to_counter(const Key& key, ByteView value, int64_t amount) {
  int64_t sum = 0;
  const auto* begin = reinterpret_cast<const char*>(value.data());
  const auto* end = begin + value.size();
  if (const auto [rest, error] = std::from_chars(begin, end, sum);
      begin != end && (error != std::errc{} || rest != end)) {
    return not_a_number(key);
  }
  if (__builtin_add_overflow(sum, amount, &sum)) return add_overflow(key, amount);
  return sum;
}

}  // namespace muster
