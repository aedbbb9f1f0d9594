// Requests that may wait: reads of missing keys, pops, barriers, and changes of leased keys.

#include <algorithm>

#include "muster/store/state/state_impl.h"

namespace muster {
namespace {
constexpr size_t kMaxValuesOfWait = 16 << 10;
}

bool StoreState::Impl::present(StoreOperation operation, const Key& key) const {
  const Entry* found = shard(key).find(key);
  if (found == nullptr) return false;
  if (operation == StoreOperation::kQueuePop) return found->has_queue();
  const bool sees_queues = operation == StoreOperation::kWait || operation == StoreOperation::kCheck;
  return found->value || (sees_queues && found->has_queue());
}

// The index of the first missing key from `from` on, or the number of keys if none is missing.
size_t StoreState::Impl::missing(const Request& request, size_t from) const {
  while (from < request.keys.size() && present(request.operation, request.keys[from])) ++from;
  return from;
}

// True if every key exists. Otherwise `cursor` moves to the next missing key. So a waiter for many keys checks each key
// about once. It checks all keys again only at the end, because a key may have been deleted in between.
bool StoreState::Impl::ready(const Request& request, size_t& cursor) const {
  const size_t keys = request.keys.size();
  const bool from_start = cursor == 0;
  cursor = missing(request, cursor);
  if (cursor == keys && !from_start) cursor = missing(request, 0);
  return cursor == keys;
}

// Fills the reply to a get, multi_get, queue_pop or wait that is released or immediate.
void StoreState::Impl::answer(const Request& request, Reply& reply) {
  if (request.operation == StoreOperation::kQueuePop) {
    Shard& shard = this->shard(request.keys[0]);
    const auto found = shard.entries.find(request.keys[0]);
    if (found == shard.entries.end() || !found->second.has_queue()) return;
    reply.number = static_cast<int64_t>(found->second.extras->queue.size());
    reply.values.push_back(shard.pop(*found));
  } else if (request.operation != StoreOperation::kWait || request.lease) {
    answer_values(request, reply);
  }
}

// A wait that is granted leases gets small values too, because a client that waits for a key usually reads it next.
void StoreState::Impl::answer_values(const Request& request, Reply& reply) {
  const bool waits = request.operation == StoreOperation::kWait;
  bool all = true;
  size_t bytes = 0;
  reply.values.reserve(request.keys.size());
  for (const Key& key : request.keys) {
    const Entry* found = shard(key).find(key);
    const bool there = found != nullptr && found->value;
    all = all && there;
    if (there) bytes += found->value->size();
    if (!waits || (there && bytes <= kMaxValuesOfWait)) reply.values.push_back(there ? *found->value : Bytes{});
  }
  reply.leased = request.lease && all && grant(request.keys, reply);
  if (waits && (!reply.leased || bytes > kMaxValuesOfWait)) reply.values.clear();
}

// Grants leases of all keys or of no key.
bool StoreState::Impl::grant(const std::vector<Key>& keys, Reply& reply) {
  reply.granted = revocations.load(std::memory_order_relaxed);
  if (keys.size() > 1 &&
      !std::all_of(keys.begin(), keys.end(), [&](const Key& key) { return shard(key).leases.leasable(key); })) {
    return false;
  }
  bool granted = !keys.empty();
  for (const Key& key : keys) granted = shard(key).leases.grant(key, reply.client) && granted;
  return granted;
}

// True if the request must wait until leases of its keys are given back. It waits at one of the keys, and is applied
// again when that key is free. Also true if the request must wait but may not: then it is answered with an error.
bool StoreState::Impl::defer(Request& request, ClientId client, Replies& out) {
  const Key* taken = nullptr;
  for (const Key& key : request.keys) {
    if (!shard(key).leases.recall(key, out)) taken = &key;
  }
  if (taken == nullptr) return false;
  request.lease = false;   // the client may have left by the time the request is carried out
  const Key key = *taken;  // a copy, as the request moves
  const RequestId id = request.id;
  if (const auto deferred = shard(key).defer(key, std::move(request), client); !deferred) {
    out.push_back({client, id, tl::unexpected(deferred.error())});
  }
  return true;
}

// False if the request waits. Its reply then comes later.
bool StoreState::Impl::answer_or_wait(Request& request, Reply& reply) {
  size_t cursor = 0;
  if (request.immediate || ready(request, cursor)) {
    answer(request, reply);
    if (request.operation == StoreOperation::kQueuePop && !reply.values.empty()) {
      shard(request.keys[0]).tidy(slot(request.keys[0]));
    }
    return true;
  }
  const ShardMask mask = shards_of(request);
  const auto waiter = shards[std::countr_zero(mask)].register_waiter(std::move(request), reply.client, mask);
  if (!waiter) {
    reply.status = tl::unexpected(waiter.error());
    return true;
  }
  const Key& key = (*waiter)->request.keys[cursor];
  (*waiter)->cursor = cursor;
  shard(key).list(**waiter, slot(key));
  return false;
}

Result<> StoreState::Impl::arrive(Request&& request, ClientId client, Replies& released) {
  const Key& key = request.keys[0];
  const int64_t wanted = request.number;
  Shard& shard = this->shard(key);
  const Entry* found = shard.find(key);
  if (found != nullptr && found->extras && found->extras->arrivals > 0 && found->extras->barrier_count != wanted) {
    return barrier_mismatch(key, wanted, found->extras->arrivals, found->extras->barrier_count);
  }
  MUSTER_ASSIGN(Waiter* const waiter, shard.register_waiter(std::move(request), client, shards_of(request)));
  Slot& slot = this->slot(waiter->request.keys[0]);
  shard.list(*waiter, slot);
  slot.second.extras->barrier_count = wanted;
  // The number of rounds is computed once, because the slot may be gone after the last round.
  for (int64_t rounds = slot.second.extras->arrivals / wanted; rounds > 0; --rounds) release_round(slot, released);
  return {};
}

// Releases `barrier_count` arrivals, the oldest first. A request with more arrivals goes on waiting with the rest.
void StoreState::Impl::release_round(Slot& slot, Replies& released) {
  for (int64_t left = slot.second.extras->barrier_count; left > 0;) {
    Waiter& waiter = *slot.second.extras->arrived.first;
    const auto count = static_cast<uint32_t>(std::min<int64_t>(left, waiter.request.weight));
    left -= count;
    released.push_back({.client = waiter.client, .id = waiter.request.id, .number = count});
    take_back(waiter, count);
  }
}

// Removes `count` arrivals of the waiter, and the waiter itself with its last arrival.
void StoreState::Impl::take_back(Waiter& waiter, uint32_t count) {
  if (count == waiter.request.weight) return forget(waiter);
  waiter.request.weight -= count;
  waiter.at->second.extras->arrivals -= count;
}

void StoreState::Impl::withdraw(const Request& request, Reply& reply) {
  Shard& home = shard(request.keys[0]);
  const auto found = home.waiters.find(WaiterName{reply.client, static_cast<RequestId>(request.number)});
  if (found == home.waiters.end() || !found->second.at_barrier() || found->second.request.keys != request.keys) return;
  const uint32_t count = std::min(request.weight, found->second.request.weight);
  reply.number = count;
  take_back(found->second, count);
}

// Checks a waiter again. True if it was released. Otherwise it waits for its next missing key.
bool StoreState::Impl::advance(Waiter& waiter, Replies& released) {
  size_t cursor = waiter.cursor;
  if (ready(waiter.request, cursor)) {
    Reply reply{waiter.client, waiter.request.id};
    answer(waiter.request, reply);
    released.push_back(std::move(reply));
    forget(waiter);
    return true;
  }
  if (cursor == waiter.cursor) return false;
  shard(waiter.at->first).unlist(waiter);
  const Key& key = waiter.request.keys[cursor];
  waiter.cursor = cursor;
  shard(key).list(waiter, slot(key));
  return false;
}

void StoreState::Impl::forget(Waiter& waiter) {
  shard(waiter.at->first).unlist(waiter);
  shards[std::countr_zero(waiter.shards)].unregister_waiter(waiter);  // its home
}

void StoreState::Impl::key_appeared(Slot& slot, Replies& released) {
  if (!slot.second.extras) return;
  for (Waiter *waiter = slot.second.extras->waiting.first, *next; waiter != nullptr; waiter = next) {
    next = waiter->next;
    if (waiter->request.operation != StoreOperation::kQueuePop) advance(*waiter, released);
  }
}

}  // namespace muster
