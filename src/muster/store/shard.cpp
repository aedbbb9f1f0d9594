#include "muster/store/shard.h"

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
  std::list<Bytes>& queue = slot.second.place->queue;
  Bytes value = std::move(queue.front());
  queue.pop_front();
  queues -= queue.empty();
  return value;
}

void Shard::take_held(const Key& key, std::vector<HeldRequest>& out) {
  auto found = held.extract(key);
  if (found.empty()) return;
  out.insert(out.end(), std::make_move_iterator(found.mapped().begin()), std::make_move_iterator(found.mapped().end()));
}

void Shard::tidy(Slot& slot) {
  if (auto& place = slot.second.place; place && place->waiting.empty() && place->arrived.empty()) {
    place->shards = 0;
    if (place->queue.empty()) place.reset();
  }
  if (!slot.second.value && !slot.second.place) entries.erase(entries.find(slot.first));
}

Result<Waiter*> Shard::take_in(Request&& request, ClientId client, ShardMask shards) {
  ClientWaits& waits = by_client[client];
  if (waits.count >= kMaxWaitsPerClient) {
    return fail(ErrorCode::kResourceExhausted,
                fmt::format("one client may wait for {} requests at a time, and this one does", kMaxWaitsPerClient));
  }
  const auto [entry, fresh] = waiters.try_emplace(WaiterName{client, request.id});
  if (!fresh) return fail(ErrorCode::kProtocol, fmt::format("request number {} is already waiting", request.id));
  Waiter& waiter = entry->second;
  waiter.client = client;
  waiter.request = std::move(request);
  waiter.shards = shards;
  waiter.next_of_client = waits.first;
  if (waits.first != nullptr) waits.first->previous_of_client = &waiter;
  waits.first = &waiter;
  ++waits.count;
  return &waiter;
}

void Shard::put_out(Waiter& waiter) {
  const auto waits = by_client.find(waiter.client);
  (waiter.previous_of_client != nullptr ? waiter.previous_of_client->next_of_client : waits->second.first) =
      waiter.next_of_client;
  if (waiter.next_of_client != nullptr) waiter.next_of_client->previous_of_client = waiter.previous_of_client;
  if (--waits->second.count == 0) by_client.erase(waits);
  waiters.erase(WaiterName{waiter.client, waiter.request.id});
}

void Shard::list(Waiter& waiter, Slot& slot) {
  Place& place = slot.second.beside();
  waiter.at = &slot;
  place.shards |= waiter.shards;
  wide += (waiter.shards & (waiter.shards - 1)) != 0;
  if (waiter.at_barrier()) place.arrivals += waiter.request.weight;
  (waiter.at_barrier() ? place.arrived : place.waiting).push_back(waiter);
}

void Shard::unlist(Waiter& waiter) {
  Place& place = *waiter.at->second.place;
  (waiter.at_barrier() ? place.arrived : place.waiting).remove(waiter);
  if (waiter.at_barrier()) place.arrivals -= waiter.request.weight;
  wide -= (waiter.shards & (waiter.shards - 1)) != 0;
  tidy(*std::exchange(waiter.at, nullptr));
}

}  // namespace muster
