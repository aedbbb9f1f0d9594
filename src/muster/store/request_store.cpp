#include "muster/store/request_store.h"

#include <fmt/format.h>

#include <algorithm>

#include "muster/base/random.h"
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

Result<> RequestStore::set(const Key& key, ByteView value, const Deadline& deadline) {
  return status(call(make(StoreOperation::kSet, {key}, {copy(value)}), deadline));
}

Result<Bytes> RequestStore::get(const Key& key, const Deadline& deadline) {
  return only_value(call(make(StoreOperation::kGet, {key}), deadline));
}

Result<Bytes> RequestStore::compare_set(const Key& key, ByteView expected, ByteView desired, const Deadline& deadline) {
  return only_value(call(make(StoreOperation::kCompareSet, {key}, {copy(expected), copy(desired)}), deadline));
}

Result<int64_t> RequestStore::add(const Key& key, int64_t amount, const Deadline& deadline) {
  return number(call(make(StoreOperation::kAdd, {key}, {}, amount), deadline));
}

Result<bool> RequestStore::check(const std::vector<Key>& keys, const Deadline& deadline) {
  return flag(call(make(StoreOperation::kCheck, keys), deadline));
}

Result<> RequestStore::wait(const std::vector<Key>& keys, const Deadline& deadline) {
  return status(call(make(StoreOperation::kWait, keys), deadline));
}

Result<bool> RequestStore::delete_key(const Key& key, const Deadline& deadline) {
  return flag(call(make(StoreOperation::kDelete, {key}), deadline));
}

Result<int64_t> RequestStore::num_keys(const Deadline& deadline) {
  return number(call(make(StoreOperation::kNumKeys, {}), deadline));
}

Result<> RequestStore::append(const Key& key, ByteView value, const Deadline& deadline) {
  return status(call(make(StoreOperation::kAppend, {key}, {copy(value)}), deadline));
}

Result<std::vector<Bytes>> RequestStore::multi_get(const std::vector<Key>& keys, const Deadline& deadline) {
  MUSTER_ASSIGN(Reply reply, call(make(StoreOperation::kMultiGet, keys), deadline));
  if (reply.values.size() == keys.size()) return std::move(reply.values);
  return fail(ErrorCode::kProtocol,
              fmt::format("the store answered with {} values for {} keys", reply.values.size(), keys.size()));
}

Result<> RequestStore::multi_set(const std::vector<Key>& keys, const std::vector<Bytes>& values,
                                 const Deadline& deadline) {
  return status(call(make(StoreOperation::kMultiSet, keys, values), deadline));
}

Result<> RequestStore::queue_push(const Key& key, ByteView value, const Deadline& deadline) {
  return status(call(make(StoreOperation::kQueuePush, {key}, {copy(value)}), deadline));
}

Result<Bytes> RequestStore::queue_pop(const Key& key, const Deadline& deadline) {
  return only_value(call(make(StoreOperation::kQueuePop, {key}), deadline));
}

Result<int64_t> RequestStore::queue_length(const Key& key, const Deadline& deadline) {
  return number(call(make(StoreOperation::kQueueLength, {key}), deadline));
}

Result<std::vector<Key>> RequestStore::list_keys(std::string_view prefix, const Deadline& deadline) {
  MUSTER_ASSIGN(Reply reply, call(make(StoreOperation::kListKeys, {Key(prefix)}), deadline));
  std::sort(reply.keys.begin(), reply.keys.end());
  return std::move(reply.keys);
}

Result<> RequestStore::barrier(const Key& key, int64_t count, const Deadline& deadline) {
  return status(call(make(StoreOperation::kBarrier, {key}, {}, count), deadline));
}

Result<StoreStat> RequestStore::stat(const Deadline& deadline) {
  MUSTER_ASSIGN(const Reply reply, call(make(StoreOperation::kStat, {}), deadline));
  return stat_of(reply);
}

Result<Reply> ExternalStore::call(Request request, const Deadline& deadline) {
  MUSTER_TRY(validate(request));
  Result<Reply> reply = carry_out(request, deadline);
  if (reply) return reply;
  if (reply.error().code != ErrorCode::kTimeout) return tl::unexpected(reply.error().in(describe(request)));
  return tl::unexpected(timed_out(request, server()));
}

std::string random_token() {
  Bytes token(16);
  fill_secure_random(token);
  return to_hex(token);
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
  return fail(ErrorCode::kUnsupported, "this store keeps no statistics; ask the store of a running job");
}

Deadline with_grace(const Deadline& deadline) { return Deadline::after(deadline.left() + kCancelGrace); }

Error timed_out(const Request& request, const std::string& where) {
  const char* reason = "was not answered in time; is the store's process alive and reachable?";
  switch (request.operation) {
    case StoreOperation::kGet:
    case StoreOperation::kMultiGet:
    case StoreOperation::kWait:
      reason = "timed out: no process has set the key; look for the one that should have";
      break;
    case StoreOperation::kQueuePop:
      reason = "timed out: no process has pushed an item";
      break;
    case StoreOperation::kBarrier:
      reason = "timed out: not all callers have arrived; look for the missing ones";
      break;
    default:
      break;
  }
  return Error{ErrorCode::kTimeout, fmt::format("{} at {} {}", describe(request), where, reason), kNoRank, {}};
}

}  // namespace muster
