#include "muster/store/request_store.h"

#include <fmt/format.h>

#include "muster/store/stat.h"

namespace muster {
namespace {

Request make(StoreOperation operation, std::vector<Key> keys, std::vector<Bytes> values = {}, int64_t number = 0) {
  return Request{operation, 0, std::move(keys), std::move(values), number};
}

Bytes copy(ByteView view) { return Bytes(view.begin(), view.end()); }

// A reply without the value it must have comes from a broken server.
Result<Bytes> only_value(Reply&& reply) {
  if (reply.values.size() == 1) return std::move(reply.values[0]);
  return fail(ErrorCode::kProtocol, fmt::format("the store answered with {} values instead of 1", reply.values.size()));
}

}  // namespace

Result<> RequestStore::set(const Key& key, ByteView value, const Deadline& deadline) {
  MUSTER_TRY(call(make(StoreOperation::kSet, {key}, {copy(value)}), deadline));
  return {};
}

Result<Bytes> RequestStore::get(const Key& key, const Deadline& deadline) {
  MUSTER_ASSIGN(Reply reply, call(make(StoreOperation::kGet, {key}), deadline));
  return only_value(std::move(reply));
}

Result<Bytes> RequestStore::compare_set(const Key& key, ByteView expected, ByteView desired, const Deadline& deadline) {
  MUSTER_ASSIGN(Reply reply, call(make(StoreOperation::kCompareSet, {key}, {copy(expected), copy(desired)}), deadline));
  return only_value(std::move(reply));
}

Result<int64_t> RequestStore::add(const Key& key, int64_t amount, const Deadline& deadline) {
  MUSTER_ASSIGN(const Reply reply, call(make(StoreOperation::kAdd, {key}, {}, amount), deadline));
  return reply.number;
}

Result<bool> RequestStore::check(const std::vector<Key>& keys, const Deadline& deadline) {
  MUSTER_ASSIGN(const Reply reply, call(make(StoreOperation::kCheck, keys), deadline));
  return reply.number != 0;
}

Result<> RequestStore::wait(const std::vector<Key>& keys, const Deadline& deadline) {
  MUSTER_TRY(call(make(StoreOperation::kWait, keys), deadline));
  return {};
}

Result<bool> RequestStore::delete_key(const Key& key, const Deadline& deadline) {
  MUSTER_ASSIGN(const Reply reply, call(make(StoreOperation::kDelete, {key}), deadline));
  return reply.number != 0;
}

Result<int64_t> RequestStore::num_keys(const Deadline& deadline) {
  MUSTER_ASSIGN(const Reply reply, call(make(StoreOperation::kNumKeys, {}), deadline));
  return reply.number;
}

Result<> RequestStore::append(const Key& key, ByteView value, const Deadline& deadline) {
  MUSTER_TRY(call(make(StoreOperation::kAppend, {key}, {copy(value)}), deadline));
  return {};
}

Result<std::vector<Bytes>> RequestStore::multi_get(const std::vector<Key>& keys, const Deadline& deadline) {
  MUSTER_ASSIGN(Reply reply, call(make(StoreOperation::kMultiGet, keys), deadline));
  if (reply.values.size() == keys.size()) return std::move(reply.values);
  return fail(ErrorCode::kProtocol,
              fmt::format("the store answered with {} values for {} keys", reply.values.size(), keys.size()));
}

Result<> RequestStore::multi_set(const std::vector<Key>& keys, const std::vector<Bytes>& values,
                                 const Deadline& deadline) {
  MUSTER_TRY(call(make(StoreOperation::kMultiSet, keys, values), deadline));
  return {};
}

Result<> RequestStore::queue_push(const Key& key, ByteView value, const Deadline& deadline) {
  MUSTER_TRY(call(make(StoreOperation::kQueuePush, {key}, {copy(value)}), deadline));
  return {};
}

Result<Bytes> RequestStore::queue_pop(const Key& key, const Deadline& deadline) {
  MUSTER_ASSIGN(Reply reply, call(make(StoreOperation::kQueuePop, {key}), deadline));
  return only_value(std::move(reply));
}

Result<int64_t> RequestStore::queue_length(const Key& key, const Deadline& deadline) {
  MUSTER_ASSIGN(const Reply reply, call(make(StoreOperation::kQueueLength, {key}), deadline));
  return reply.number;
}

Result<std::vector<Key>> RequestStore::list_keys(std::string_view prefix, const Deadline& deadline) {
  MUSTER_ASSIGN(Reply reply, call(make(StoreOperation::kListKeys, {Key(prefix)}), deadline));
  return std::move(reply.keys);
}

Result<> RequestStore::barrier(const Key& key, int64_t count, const Deadline& deadline) {
  MUSTER_TRY(call(make(StoreOperation::kBarrier, {key}, {}, count), deadline));
  return {};
}

Result<StoreStat> RequestStore::stat(const Deadline& deadline) {
  MUSTER_ASSIGN(const Reply reply, call(make(StoreOperation::kStat, {}), deadline));
  return stat_of(reply);
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

Result<StoreStat> Store::stat(const Deadline&) {
  return fail(ErrorCode::kUnsupported, "this store does not count what it does; ask the store of a running job");
}

Deadline with_grace(const Deadline& deadline) { return Deadline::after(deadline.left() + kCancelGrace); }

Error timed_out(const Request& request, const std::string& where) {
  const char* reason = "was not answered in time; is the store's process alive and reachable?";
  switch (request.operation) {
    case StoreOperation::kGet:
    case StoreOperation::kMultiGet:
    case StoreOperation::kWait:
      reason = "waited in vain for what no process has set yet; look for the one that should have";
      break;
    case StoreOperation::kQueuePop:
      reason = "waited in vain, nothing was pushed";
      break;
    case StoreOperation::kBarrier:
      reason = "waited in vain for the other callers; look for the one that did not arrive";
      break;
    default:
      break;
  }
  return Error{ErrorCode::kTimeout, fmt::format("{} at {} {}", describe(request), where, reason), kNoRank, {}};
}

}  // namespace muster
