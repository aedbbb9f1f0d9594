#include "store/random_requests.h"

namespace muster {

namespace {
constexpr int kCallsPerKey = 25;
}

bool may_wait(const Request& request) {
  switch (request.operation) {
    case StoreOperation::kGet:
    case StoreOperation::kMultiGet:
    case StoreOperation::kQueuePop:
    case StoreOperation::kWait:
    case StoreOperation::kBarrier:
      return !request.immediate;
    default:
      return false;
  }
}

RandomRequests::RandomRequests(uint64_t seed, int client, bool barriers, bool wide)
    : random_(seed * 1000003 + static_cast<uint64_t>(client)),
      prefix_(std::to_string(seed) + "/"),
      client_(client),
      barriers_(barriers),
      wide_(wide) {}

Request RandomRequests::next() {
  ++calls_;
  if (wide_ && random_.chance(0.05)) return about_all();
  const uint64_t kind = random_.below(barriers_ ? 20 : 19);
  if (kind < 8) return about_value();
  if (kind < 11) return about_counter();
  if (kind < 15) return about_queue();
  if (kind < 19) return about_several();
  return {StoreOperation::kBarrier, 0, {key("b", 1)}, {}, 2};
}

// All clients change to new keys from time to time, because leases and waiters matter most while a key is new.
Key RandomRequests::key(const char* kind, uint64_t count) {
  return prefix_ + kind + std::to_string(random_.below(count)) + "." + std::to_string(calls_ / kCallsPerKey);
}
Bytes RandomRequests::value() { return to_bytes(std::to_string(client_) + "." + std::to_string(serial_++)); }

Request RandomRequests::about_value() {
  const Key mine = key("r", 2);
  switch (random_.below(8)) {
    case 0:
    case 1:
      return {StoreOperation::kSet, 0, {mine}, {last_ = value()}};
    case 2:
      return {StoreOperation::kCompareSet, 0, {mine}, {random_.chance(0.5) ? Bytes{} : last_, value()}};
    case 3:
      return {StoreOperation::kAppend, 0, {mine}, {to_bytes("+")}};
    case 4:
      return {StoreOperation::kDelete, 0, {mine}};
    case 5:
      return {random_.chance(0.5) ? StoreOperation::kCheck : StoreOperation::kWait, 0, {mine}};
    default:
      return {StoreOperation::kGet, 0, {mine}};
  }
}

Request RandomRequests::about_counter() {
  const Key mine = key("n", 1);
  if (random_.chance(0.2)) return {StoreOperation::kGet, 0, {mine}};
  if (random_.chance(0.1)) return {StoreOperation::kDelete, 0, {mine}};
  return {StoreOperation::kAdd, 0, {mine}, {}, static_cast<int64_t>(random_.between(1, 1000))};
}

Request RandomRequests::about_queue() {
  const Key mine = key("q", 1);
  switch (random_.below(6)) {
    case 0:
    case 1:
      return {StoreOperation::kQueuePush, 0, {mine}, {value()}};
    case 2:
      return {StoreOperation::kQueueLength, 0, {mine}};
    case 3:
      return {StoreOperation::kWait, 0, {mine}};
    default:
      return {StoreOperation::kQueuePop, 0, {mine}};
  }
}

Request RandomRequests::about_several() {
  const std::vector<Key> both{key("m", 1), key("o", 1)};
  switch (random_.below(5)) {
    case 0:
      return {StoreOperation::kMultiSet, 0, both, {value(), value()}};
    case 1:
      return {StoreOperation::kDelete, 0, {both[random_.below(2)]}};
    case 2:
      return {random_.chance(0.5) ? StoreOperation::kCheck : StoreOperation::kWait, 0, both};
    default:
      return {StoreOperation::kMultiGet, 0, both};
  }
}

Request RandomRequests::about_all() {
  if (random_.chance(0.3)) return {StoreOperation::kNumKeys};
  if (random_.chance(0.3)) return {StoreOperation::kNumKeys, 0, {prefix_ + "r"}};
  return {StoreOperation::kListKeys, 0, {prefix_ + (random_.chance(0.5) ? "" : "m")}};
}

}  // namespace muster
