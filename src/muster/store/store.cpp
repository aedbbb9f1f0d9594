#include "muster/store/store.h"

#include <fmt/format.h>

#include <algorithm>

#include "muster/store/stat.h"

namespace muster {
namespace {

Request make(StoreOperation operation, std::vector<Key> keys, std::vector<Bytes> values = {}, int64_t number = 0) {
  return Request{operation, 0, std::move(keys), std::move(values), number};
}

Bytes copy(ByteView view) { return Bytes(view.begin(), view.end()); }

// Returns the only value of the reply. kProtocol if the server sent another number of values.
Result<Bytes> only_value(Result<Reply>&& reply) {
  if (!reply) return tl::unexpected(std::move(reply).error());
  if (reply->values.size() == 1) return std::move(reply->values[0]);
  return fail(ErrorCode::kProtocol,
              fmt::format("the store answered with {} values instead of 1", reply->values.size()));
}

Result<int64_t> number(const Result<Reply>& reply) {
  return reply.map([](const Reply& answer) { return answer.number; });
}

Result<bool> flag(const Result<Reply>& reply) {
  return reply.map([](const Reply& answer) { return answer.number != 0; });
}

Result<> status(const Result<Reply>& reply) {
  return reply.map([](const Reply&) {});
}

}  // namespace

Result<> Store::set(const Key& key, ByteView value, const Deadline& deadline) {
  return status(call(make(StoreOperation::kSet, {key}, {copy(value)}), deadline));
}

Result<Bytes> Store::get(const Key& key, const Deadline& deadline) {
  return only_value(call(make(StoreOperation::kGet, {key}), deadline));
}

Result<Bytes> Store::compare_set(const Key& key, ByteView expected, ByteView desired, const Deadline& deadline) {
  return only_value(call(make(StoreOperation::kCompareSet, {key}, {copy(expected), copy(desired)}), deadline));
}

Result<int64_t> Store::add(const Key& key, int64_t amount, const Deadline& deadline) {
  return number(call(make(StoreOperation::kAdd, {key}, {}, amount), deadline));
}

Result<bool> Store::check(const std::vector<Key>& keys, const Deadline& deadline) {
  return flag(call(make(StoreOperation::kCheck, keys), deadline));
}

Result<> Store::wait(const std::vector<Key>& keys, const Deadline& deadline) {
  return status(call(make(StoreOperation::kWait, keys), deadline));
}

Result<bool> Store::delete_key(const Key& key, const Deadline& deadline) {
  return flag(call(make(StoreOperation::kDelete, {key}), deadline));
}

Result<int64_t> Store::num_keys(const Deadline& deadline) {
  return number(call(make(StoreOperation::kNumKeys, {}), deadline));
}

Result<> Store::append(const Key& key, ByteView value, const Deadline& deadline) {
  return status(call(make(StoreOperation::kAppend, {key}, {copy(value)}), deadline));
}

Result<std::vector<Bytes>> Store::multi_get(const std::vector<Key>& keys, const Deadline& deadline) {
  MUSTER_ASSIGN(Reply reply, call(make(StoreOperation::kMultiGet, keys), deadline));
  if (reply.values.size() == keys.size()) return std::move(reply.values);
  return fail(ErrorCode::kProtocol,
              fmt::format("the store answered with {} values for {} keys", reply.values.size(), keys.size()));
}

Result<> Store::multi_set(const std::vector<Key>& keys, const std::vector<Bytes>& values, const Deadline& deadline) {
  return status(call(make(StoreOperation::kMultiSet, keys, values), deadline));
}

Result<> Store::queue_push(const Key& key, ByteView value, const Deadline& deadline) {
  return status(call(make(StoreOperation::kQueuePush, {key}, {copy(value)}), deadline));
}

Result<Bytes> Store::queue_pop(const Key& key, const Deadline& deadline) {
  return only_value(call(make(StoreOperation::kQueuePop, {key}), deadline));
}

Result<int64_t> Store::queue_length(const Key& key, const Deadline& deadline) {
  return number(call(make(StoreOperation::kQueueLength, {key}), deadline));
}

Result<std::vector<Key>> Store::list_keys(std::string_view prefix, const Deadline& deadline) {
  MUSTER_ASSIGN(Reply reply, call(make(StoreOperation::kListKeys, {Key(prefix)}), deadline));
  std::sort(reply.keys.begin(), reply.keys.end());
  return std::move(reply.keys);
}

Result<> Store::barrier(const Key& key, int64_t count, const Deadline& deadline) {
  return status(call(make(StoreOperation::kBarrier, {key}, {}, count), deadline));
}

Result<StoreStat> Store::stat(const Deadline& deadline) {
  MUSTER_ASSIGN(const Reply reply, call(make(StoreOperation::kStat, {}), deadline));
  return stat_of(reply);
}

}  // namespace muster
