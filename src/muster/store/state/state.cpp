#include "muster/store/state/state.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>

#include "muster/base/check.h"
#include "muster/store/stat.h"
#include "muster/store/state/state_impl.h"

namespace muster {
namespace {

Result<int64_t> parse_counter(const Key& key, const Bytes& text) {
  int64_t value = 0;
  const auto* begin = reinterpret_cast<const char*>(text.data());
  const auto* end = begin + text.size();
  if (begin == end) return value;
  const auto [rest, error] = std::from_chars(begin, end, value);
  if (error == std::errc{} && rest == end) return value;
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("add to key \"{}\" needs a decimal number there, but it holds {} bytes of something else",
                          key, text.size()));
}

// What may release waiters.
bool writes(StoreOperation operation) {
  switch (operation) {
    case StoreOperation::kSet:
    case StoreOperation::kCompareSet:
    case StoreOperation::kAdd:
    case StoreOperation::kAppend:
    case StoreOperation::kQueuePush:
    case StoreOperation::kMultiSet:
      return true;
    default:
      return false;
  }
}

// What changes a value that may be leased.
bool changes(StoreOperation operation) {
  return operation == StoreOperation::kDelete || (writes(operation) && operation != StoreOperation::kQueuePush);
}

// Whether anybody waits in these shards who is concerned with others too.
bool has_wide(const Shard* shards, ShardMask held) {
  for (ShardMask rest = held; rest != 0; rest &= rest - 1) {
    if (shards[std::countr_zero(rest)].wide > 0) return true;
  }
  return false;
}

Result<> cancelled() { return fail(ErrorCode::kAborted, "the request was cancelled by its client"); }

}  // namespace

bool is_answered(StoreOperation operation) {
  switch (operation) {
    case StoreOperation::kSet:
    case StoreOperation::kMultiSet:
    case StoreOperation::kAppend:
    case StoreOperation::kQueuePush:
      return false;
    default:
      return true;
  }
}

ShardMask StoreState::Impl::shards_of(const Request& request) const {
  if (request.operation == StoreOperation::kNumKeys || request.operation == StoreOperation::kListKeys)
    return everywhere();
  ShardMask mask = 0;
  for (const Key& key : request.keys) mask |= ShardMask{1} << index(key);
  return mask;
}

// Who waits for a key that the request writes may wait for keys of other shards too, and is released with all held.
ShardMask StoreState::Impl::shards_of_released(const Request& request) const {
  ShardMask mask = 0;
  if (!writes(request.operation)) return mask;
  for (const Key& key : request.keys) {
    const Entry* entry = shard(key).find(key);
    if (entry != nullptr && entry->place) mask |= entry->place->shards;
  }
  return mask;
}

// ---- what changes the store

void StoreState::Impl::store(const Key& key, Bytes value, Replies& released) {
  Shard& shard = this->shard(key);
  Slot& slot = *shard.entries.try_emplace(key).first;
  shard.set(slot, std::move(value));
  key_appeared(slot, released);
}

// Who makes a key is likely to be near to who reads it next.
void StoreState::Impl::set(Request& request, Reply& reply, Replies& released) {
  const Key& key = request.keys[0];
  const bool fresh = request.lease && !present(StoreOperation::kGet, key);
  store(key, std::move(request.values[0]), released);
  reply.leased = fresh && grant(request.keys, reply);
}

Result<> StoreState::Impl::compare_set(Request& request, Reply& reply, Replies& released) {
  const Key& key = request.keys[0];
  Bytes &expected = request.values[0], &desired = request.values[1];
  const Entry* found = shard(key).find(key);
  const bool absent = found == nullptr || !found->value;
  if (absent ? expected.empty() : *found->value == expected) {
    reply.values.push_back(desired);
    store(key, std::move(desired), released);
  } else {
    reply.values.push_back(absent ? std::move(expected) : *found->value);
  }
  return {};
}

Result<> StoreState::Impl::add(Request& request, Reply& reply, Replies& released) {
  const Key& key = request.keys[0];
  Shard& shard = this->shard(key);
  const auto found = shard.entries.find(key);
  const bool exists = found != shard.entries.end() && found->second.value;
  int64_t sum = 0;
  if (exists) {
    MUSTER_ASSIGN(sum, parse_counter(key, *found->second.value));
  }
  if (__builtin_add_overflow(sum, request.number, &sum)) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("adding {} to key \"{}\" would overflow 64 bits", request.number, key));
  }
  char text[24];
  const auto written = std::to_chars(std::begin(text), std::end(text), sum);
  if (exists) {
    found->second.value->assign(text, written.ptr);  // whoever waits for the key has been released
  } else {
    store(key, Bytes(text, written.ptr), released);
  }
  reply.number = sum;
  return {};
}

Result<> StoreState::Impl::append(Request& request, Replies& released) {
  const Key& key = request.keys[0];
  const Bytes& more = request.values[0];
  Slot& slot = this->slot(key);
  if (!slot.second.value) {
    shard(key).set(slot, {});
  } else if (slot.second.value->size() + more.size() > kMaxValueBytes) {
    return fail(ErrorCode::kResourceExhausted,
                fmt::format("append would grow key \"{}\" over {} bytes", key, kMaxValueBytes));
  }
  slot.second.value->insert(slot.second.value->end(), more.begin(), more.end());
  key_appeared(slot, released);
  return {};
}

void StoreState::Impl::push(Request& request, Replies& released) {
  const Key& key = request.keys[0];
  Slot& slot = this->slot(key);
  KeyExtras& place = slot.second.beside();
  shard(key).queues += place.queue.empty();
  place.queue.push_back(std::move(request.values[0]));
  // A caller of pop goes first: it takes the value, so that none ever waits while the queue holds something.
  for (const StoreOperation concerned : {StoreOperation::kQueuePop, StoreOperation::kWait}) {
    for (Waiter *waiter = place.waiting.first, *next; waiter != nullptr; waiter = next) {
      next = waiter->next;
      if (waiter->request.operation == concerned && advance(*waiter, released)) return;
    }
  }
}

Result<> StoreState::Impl::write(Request& request, Reply& reply, Replies& released) {
  switch (request.operation) {
    case StoreOperation::kSet:
      set(request, reply, released);
      return {};
    case StoreOperation::kCompareSet:
      return compare_set(request, reply, released);
    case StoreOperation::kAdd:
      return add(request, reply, released);
    case StoreOperation::kAppend:
      return append(request, released);
    case StoreOperation::kDelete:
      reply.number = shard(request.keys[0]).erase(request.keys[0]);
      return {};
    case StoreOperation::kQueuePush:
      push(request, released);
      return {};
    case StoreOperation::kMultiSet:
      for (size_t i = 0; i < request.keys.size(); ++i) {
        shard(request.keys[i]).set(slot(request.keys[i]), std::move(request.values[i]));
      }
      // Not before all are there: whoever waits for one of them reads the others too.
      for (const Key& key : request.keys) key_appeared(slot(key), released);
      return {};
    default:
      return fail(ErrorCode::kUnsupported, "this store does not know the operation");
  }
}

// ---- what only looks

int64_t StoreState::Impl::count_keys(const Request& request) const {
  int64_t total = 0;
  for (unsigned i = 0; i < count; ++i) {
    if (request.keys.empty()) total += static_cast<int64_t>(shards[i].keys);
    if (request.keys.empty()) continue;
    total += std::count_if(shards[i].entries.begin(), shards[i].entries.end(), [&](const Slot& slot) {
      return slot.second.value && slot.first.starts_with(request.keys[0]);
    });
  }
  return total;
}

void StoreState::Impl::list_keys(const Key& prefix, Reply& reply) const {
  for (unsigned i = 0; i < count; ++i) {
    for (const auto& [key, entry] : shards[i].entries) {
      if (entry.value && key.starts_with(prefix)) reply.keys.push_back(key);
    }
  }
  std::sort(reply.keys.begin(), reply.keys.end());
}

void StoreState::Impl::read(const Request& request, Reply& reply) const {
  switch (request.operation) {
    case StoreOperation::kCheck:
      reply.number = missing(request, 0) == request.keys.size();
      return;
    case StoreOperation::kNumKeys:
      reply.number = count_keys(request);
      return;
    case StoreOperation::kListKeys:
      return list_keys(request.keys[0], reply);
    case StoreOperation::kQueueLength: {
      const Entry* found = shard(request.keys[0]).find(request.keys[0]);
      reply.number = found != nullptr && found->place ? static_cast<int64_t>(found->place->queue.size()) : 0;
      return;
    }
    default:
      MUSTER_CHECK(false, "not an operation that only looks");
  }
}

// ---- dispatch

void StoreState::Impl::run(Request&& request, ClientId client, Replies& out) {
  const size_t own = out.size();
  Reply reply{client, request.id};
  out.emplace_back();  // its place is before those that it releases
  switch (request.operation) {
    case StoreOperation::kCheck:
    case StoreOperation::kNumKeys:
    case StoreOperation::kQueueLength:
    case StoreOperation::kListKeys:
      read(request, reply);
      break;
    case StoreOperation::kBarrier:
      out.pop_back();  // the one that releases is released like the others
      reply.status = arrive(std::move(request), client, out);
      if (reply.status) return;
      out.emplace_back();
      break;
    case StoreOperation::kGet:
    case StoreOperation::kMultiGet:
    case StoreOperation::kQueuePop:
    case StoreOperation::kWait:
      if (answer_or_wait(request, reply)) break;
      return out.pop_back();
    case StoreOperation::kWithdraw:
      withdraw(request, reply);
      break;
    default:
      reply.status = write(request, reply, out);
      break;
  }
  out[own] = std::move(reply);
}

StoreState::StoreState(unsigned shards) : impl_(std::make_unique<Impl>(std::clamp(shards, 1U, kMaxShards))) {}
StoreState::~StoreState() = default;

Replies StoreState::apply(Request request, ClientId client) {
  Replies replies;
  apply(std::move(request), client, replies);
  return replies;
}

void StoreState::apply(Request&& request, ClientId client, Replies& out) {
  if (const auto valid = validate(request); !valid) {
    out.push_back({client, request.id, tl::unexpected(valid.error())});
    return;
  }
  if (request.operation == StoreOperation::kCancel) return cancel(request.id, client, out);
  if (request.operation == StoreOperation::kStat) {
    out.push_back({client, request.id});
    return put_stat(stat(), out.back());
  }
  if (request.operation == StoreOperation::kRelease) return give_back(request, client, out);
  ShardMask mask = impl_->shards_of(request);
  while (true) {
    const ShardLock hold(impl_->shards.get(), mask);
    if (changes(request.operation) && impl_->defer(request, client, out)) return;
    const ShardMask wanted = has_wide(impl_->shards.get(), mask) ? mask | impl_->shards_of_released(request) : mask;
    if (wanted == mask) return impl_->run(std::move(request), client, out);
    mask = wanted;
  }
}

void StoreState::give_back(const Request& request, ClientId client, Replies& out) {
  for (const Key& key : request.keys) {
    std::vector<HeldRequest> freed;
    {
      Shard& shard = impl_->shard(key);
      const std::lock_guard lock(shard.mutex);
      if (shard.leases.release(key, client)) shard.take_held(key, freed);
    }
    retry(std::move(freed), out);
  }
}

uint64_t StoreState::revoke(ClientId client, Replies& out) {
  for (unsigned i = 0; i < impl_->count; ++i) {
    Shard& shard = impl_->shards[i];
    std::vector<HeldRequest> freed;
    {
      const std::lock_guard lock(shard.mutex);
      std::vector<Key> keys;
      shard.leases.revoke(client, keys);
      for (const Key& key : keys) shard.take_held(key, freed);
    }
    retry(std::move(freed), out);
  }
  return impl_->revocations.fetch_add(1, std::memory_order_relaxed) + 1;  // the shards' locks order it
}

void StoreState::retry(std::vector<HeldRequest> held, Replies& out) {
  for (HeldRequest& request : held) apply(std::move(request.request), request.client, out);
}

// A waiter is found in its home, and may then need more shards to be held: by then it may be gone, or be another one.
void StoreState::cancel(RequestId id, ClientId client, Replies& out) {
  const auto find = [&](Shard& home) {
    const auto found = home.waiters.find(WaiterName{client, id});
    return found == home.waiters.end() ? nullptr : &found->second;
  };
  for (unsigned i = 0; i < impl_->count; ++i) {
    ShardMask mask = ShardMask{1} << i;
    while (true) {
      const ShardLock hold(impl_->shards.get(), mask);
      Waiter* waiter = find(impl_->shards[i]);
      if (waiter == nullptr && !impl_->shards[i].forget_held(client, id)) break;
      if (waiter == nullptr) {
        out.push_back({client, id, cancelled()});
        return;
      }
      const ShardMask wanted = mask | waiter->shards;
      if (wanted == mask) {
        impl_->forget(*waiter);
        out.push_back({client, id, cancelled()});
        return;
      }
      mask = wanted;
    }
  }
}

void StoreState::drop(ClientId client) {
  for (unsigned i = 0; i < impl_->count; ++i) {
    ShardMask mask = ShardMask{1} << i;
    while (true) {
      const ShardLock hold(impl_->shards.get(), mask);
      const auto found = impl_->shards[i].by_client.find(client);
      if (found == impl_->shards[i].by_client.end()) break;
      if (found->second.first == nullptr) {
        impl_->shards[i].drop_held(client);
        break;
      }
      Waiter& waiter = *found->second.first;
      const ShardMask wanted = mask | waiter.shards;
      if (wanted == mask) impl_->forget(waiter);
      mask = wanted;
    }
  }
}

StoreStat StoreState::stat() const {
  StoreStat stat;
  for (unsigned i = 0; i < impl_->count; ++i) {
    const ShardLock hold(impl_->shards.get(), ShardMask{1} << i);
    stat.keys += impl_->shards[i].keys;
    stat.queues += impl_->shards[i].queues;
    stat.waiters += impl_->shards[i].waiters.size();
  }
  return stat;
}

size_t StoreState::waiters() const { return stat().waiters; }

}  // namespace muster
