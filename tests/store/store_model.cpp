#include "store/store_model.h"

#include <algorithm>
#include <charconv>

namespace muster {

bool changes(StoreOperation operation) {
  switch (operation) {
    case StoreOperation::kSet:
    case StoreOperation::kCompareSet:
    case StoreOperation::kAdd:
    case StoreOperation::kDelete:
    case StoreOperation::kAppend:
    case StoreOperation::kMultiSet:
    case StoreOperation::kQueuePush:
    case StoreOperation::kQueuePop:
      return true;
    default:
      return false;
  }
}

bool StoreModel::present(const Request& request) const {
  const auto there = [&](const Key& key) {
    return request.operation == StoreOperation::kQueuePop ? queues_.contains(key)
           : request.operation == StoreOperation::kGet || request.operation == StoreOperation::kMultiGet
               ? data_.contains(key)
               : visible(key);
  };
  return std::all_of(request.keys.begin(), request.keys.end(), there);
}

Bytes StoreModel::value_or_empty(const Key& key) const {
  const auto found = data_.find(key);
  return found == data_.end() ? Bytes{} : found->second;
}

Result<> StoreModel::add(const Request& request, Reply& reply) {
  const std::string text = to_string(value_or_empty(request.keys[0]));
  int64_t sum = 0;
  if (!text.empty()) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), sum);
    if (error != std::errc{} || end != text.data() + text.size()) return fail(ErrorCode::kInvalidArgument, "no number");
  }
  if (__builtin_add_overflow(sum, request.number, &sum)) return fail(ErrorCode::kInvalidArgument, "overflow");
  data_[request.keys[0]] = to_bytes(std::to_string(sum));
  reply.number = sum;
  return {};
}

void StoreModel::compare_set(const Request& request, Reply& reply) {
  const Key& key = request.keys[0];
  const bool there = data_.contains(key);
  if (value_or_empty(key) == request.values[0]) data_[key] = request.values[1];
  reply.values = {data_.contains(key) ? data_[key] : there ? Bytes{} : request.values[0]};
}

void StoreModel::pop(const Request& request, Reply& reply) {
  const auto found = queues_.find(request.keys[0]);
  if (found == queues_.end()) return;
  reply.number = std::ssize(found->second);
  reply.values = {found->second.front()};
  found->second.pop_front();
  if (found->second.empty()) queues_.erase(found);
}

std::optional<Reply> StoreModel::apply(const Request& request) {
  Reply reply{0, request.id};
  const auto key = [&]() -> const Key& { return request.keys[0]; };
  switch (request.operation) {
    case StoreOperation::kGet:
    case StoreOperation::kMultiGet:
      if (!request.immediate && !present(request)) return std::nullopt;
      for (const Key& each : request.keys) reply.values.push_back(value_or_empty(each));
      break;
    case StoreOperation::kWait:
      if (!request.immediate && !present(request)) return std::nullopt;
      break;
    case StoreOperation::kQueuePop:
      if (!request.immediate && !present(request)) return std::nullopt;
      pop(request, reply);
      break;
    case StoreOperation::kCheck:
      reply.number = present(request);
      break;
    case StoreOperation::kNumKeys:
      reply.number = std::count_if(data_.begin(), data_.end(), [&](const auto& entry) {
        return request.keys.empty() || entry.first.starts_with(key());
      });
      break;
    case StoreOperation::kQueueLength:
      reply.number = queues_.contains(key()) ? std::ssize(queues_.at(key())) : 0;
      break;
    case StoreOperation::kListKeys:
      for (const auto& [each, value] : data_) {
        if (each.starts_with(key())) reply.keys.push_back(each);
      }
      break;
    case StoreOperation::kSet:
    case StoreOperation::kMultiSet:
      for (size_t i = 0; i < request.keys.size(); ++i) data_[request.keys[i]] = request.values[i];
      break;
    case StoreOperation::kCompareSet:
      compare_set(request, reply);
      break;
    case StoreOperation::kAdd:
      reply.status = add(request, reply);
      break;
    case StoreOperation::kAppend: {
      Bytes& value = data_[key()];
      value.insert(value.end(), request.values[0].begin(), request.values[0].end());
      break;
    }
    case StoreOperation::kDelete:
      reply.number = static_cast<int64_t>(data_.erase(key()));
      break;
    case StoreOperation::kQueuePush:
      queues_[key()].push_back(request.values[0]);
      break;
    default:
      reply.status = fail(ErrorCode::kUnsupported, "not in the model");
  }
  return reply;
}

std::string StoreModel::fingerprint() const {
  Writer out;
  for (const auto& [key, value] : data_) out.put_string(key).put_bytes(value);
  out.put(uint32_t{0xffffffff});  // a separator: no key has this length
  for (const auto& [key, values] : queues_) {
    out.put_string(key).put(static_cast<uint32_t>(values.size()));
    for (const Bytes& value : values) out.put_bytes(value);
  }
  return to_string(out.bytes());
}

bool same_answer(const Request& request, const Reply& expected, const Reply& seen) {
  if (expected.status.has_value() != seen.status.has_value()) return false;
  if (!expected.status) return expected.status.error().code == seen.status.error().code;
  switch (request.operation) {
    case StoreOperation::kGet:
    case StoreOperation::kMultiGet:
    case StoreOperation::kCompareSet:
    case StoreOperation::kQueuePop:
      return expected.values == seen.values;
    case StoreOperation::kAdd:
    case StoreOperation::kCheck:
    case StoreOperation::kDelete:
    case StoreOperation::kNumKeys:
    case StoreOperation::kQueueLength:
      return expected.number == seen.number;
    case StoreOperation::kListKeys: {
      std::vector<Key> sorted = seen.keys;
      std::sort(sorted.begin(), sorted.end());
      return expected.keys == sorted;
    }
    default:
      return true;
  }
}

}  // namespace muster
