#include "muster/store/state/shard.h"

#include <fmt/format.h>

namespace muster {

void WaitList::push_back(Waiter& waiter) {
  waiter.previous = last;
  waiter.next = nullptr;
  (last != nullptr ? last->next : first) = &waiter;
  last = &waiter;
}

void WaitList::remove(Waiter& waiter) {
  (waiter.previous != nullptr ? waiter.previous->next : first) = waiter.next;
  (waiter.next != nullptr ? waiter.next->previous : last) = waiter.previous;
}

Entry* Shard::find(const Key& key) {
  const auto found = entries.find(key);
  return found == entries.end() ? nullptr : &found->second;
}

void Shard::set(Slot& slot, Bytes value) {
  keys += !slot.second.value;
  slot.second.value = std::move(value);
}

bool Shard::erase(const Key& key) {
  const auto found = entries.find(key);
  if (found == entries.end() || !found->second.value) return false;
  found->second.value.reset();
  --keys;
  tidy(*found);
  return true;
}

Bytes Shard::pop(Slot& slot) {
  std::list<Bytes>& queue = slot.second.extras->queue;
  Bytes value = std::move(queue.front());
  queue.pop_front();
  queues -= queue.empty();
  return value;
}

Result<> Shard::defer(const Key& key, Request&& request, ClientId client) {
  MUSTER_TRY(may_wait(client, request.id));
  ClientWaits& waits = by_client[client];
  auto& there = deferred[key];
  const RequestId id = request.id;
  waits.deferred[id] = {key, there.insert(there.end(), {std::move(request), client})};
  ++waits.count;
  return {};
}

bool Shard::forget_deferred(ClientId client, RequestId id) {
  const auto waits = by_client.find(client);
  if (waits == by_client.end()) return false;
  const auto removed = waits->second.deferred.extract(id);
  if (removed.empty()) return false;
  const auto there = deferred.find(removed.mapped().key);
  there->second.erase(removed.mapped().at);
  if (there->second.empty()) deferred.erase(there);
  uncount(client);
  return true;
}

void Shard::drop_deferred(ClientId client) {
  const auto waits = by_client.find(client);
  if (waits == by_client.end()) return;
  std::vector<RequestId> answered;
  for (const auto& [id, waiting] : waits->second.deferred) {
    if (!has(waiting.at->request.operation, kNoTorchReply)) answered.push_back(id);
  }
  for (const RequestId id : answered) forget_deferred(client, id);
}

void Shard::take_deferred(const Key& key, std::vector<DeferredRequest>& out) {
  auto found = deferred.extract(key);
  if (found.empty()) return;
  for (const DeferredRequest& one : found.mapped()) {
    by_client.at(one.client).deferred.erase(one.request.id);
    uncount(one.client);
  }
  out.insert(out.end(), std::make_move_iterator(found.mapped().begin()), std::make_move_iterator(found.mapped().end()));
}

void Shard::tidy(Slot& slot) {
  if (auto& extras = slot.second.extras; extras && extras->waiting.empty() && extras->arrived.empty()) {
    extras->shards = 0;
    if (extras->queue.empty()) extras.reset();
  }
  if (!slot.second.value && !slot.second.extras) entries.erase(entries.find(slot.first));
}

Result<> Shard::may_wait(ClientId client, RequestId id) const {
  const auto waits = by_client.find(client);
  if (waits == by_client.end()) return {};
  if (waits->second.count >= kMaxWaitsPerClient) {
    return fail(ErrorCode::kResourceExhausted,
                fmt::format("one client may wait for {} requests at a time, and this one does", kMaxWaitsPerClient));
  }
  if (waiters.contains(WaiterName{client, id}) || waits->second.deferred.contains(id)) {
    return fail(ErrorCode::kProtocol, fmt::format("request number {} is already waiting", id));
  }
  return {};
}

void Shard::uncount(ClientId client) {
  const auto waits = by_client.find(client);
  if (--waits->second.count == 0) by_client.erase(waits);
}

Result<Waiter*> Shard::register_waiter(Request&& request, ClientId client, ShardMask shards) {
  MUSTER_TRY(may_wait(client, request.id));
  ClientWaits& waits = by_client[client];
  Waiter& waiter = waiters[WaiterName{client, request.id}];
  waiter.client = client;
  waiter.request = std::move(request);
  waiter.shards = shards;
  waiter.next_of_client = waits.first;
  if (waits.first != nullptr) waits.first->previous_of_client = &waiter;
  waits.first = &waiter;
  ++waits.count;
  return &waiter;
}

void Shard::unregister_waiter(Waiter& waiter) {
  const auto waits = by_client.find(waiter.client);
  (waiter.previous_of_client != nullptr ? waiter.previous_of_client->next_of_client : waits->second.first) =
      waiter.next_of_client;
  if (waiter.next_of_client != nullptr) waiter.next_of_client->previous_of_client = waiter.previous_of_client;
  const WaiterName name{waiter.client, waiter.request.id};
  uncount(name.client);
  waiters.erase(name);
}

void Shard::list(Waiter& waiter, Slot& slot) {
  KeyExtras& extras = slot.second.ensure_extras();
  waiter.at = &slot;
  extras.shards |= waiter.shards;
  multi_shard_waiters += (waiter.shards & (waiter.shards - 1)) != 0;
  if (waiter.at_barrier()) extras.arrivals += waiter.request.weight;
  (waiter.at_barrier() ? extras.arrived : extras.waiting).push_back(waiter);
}

void Shard::unlist(Waiter& waiter) {
  KeyExtras& extras = *waiter.at->second.extras;
  (waiter.at_barrier() ? extras.arrived : extras.waiting).remove(waiter);
  if (waiter.at_barrier()) extras.arrivals -= waiter.request.weight;
  multi_shard_waiters -= (waiter.shards & (waiter.shards - 1)) != 0;
  tidy(*std::exchange(waiter.at, nullptr));
}

}  // namespace muster
