#include "muster/store/state/state.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>

#include "muster/store/stat.h"
#include "muster/store/state/state_impl.h"

namespace muster {
namespace {

constexpr size_t kBucketsPerStep = 8192;  // a step of a scan takes about 100 us

// True if a waiter that is listed in one of these shards has keys in other shards too.
bool has_multi_shard_waiters(const Shard* shards, ShardMask held) {
  for (ShardMask rest = held; rest != 0; rest &= rest - 1) {
    if (shards[std::countr_zero(rest)].multi_shard_waiters > 0) return true;
  }
  return false;
}

}  // namespace

ShardMask StoreState::Impl::shards_of(const Request& request) const {
  if (request.operation == StoreOperation::kNumKeys) return everywhere();
  ShardMask mask = 0;
  for (const Key& key : request.keys) mask |= ShardMask{1} << index(key);
  return mask;
}

// Returns the shards of all keys of the waiters that the request may release. Their locks must be held for the release.
ShardMask StoreState::Impl::shards_of_released(const Request& request) const {
  ShardMask mask = 0;
  if (!has(request.operation, kMayRelease)) return mask;
  for (const Key& key : request.keys) {
    const Entry* entry = shard(key).find(key);
    if (entry != nullptr && entry->extras) mask |= entry->extras->shards;
  }
  return mask;
}

// ---- requests that change the store

void StoreState::Impl::store(const Key& key, Bytes value, Replies& released) {
  Shard& shard = this->shard(key);
  Slot& slot = *shard.entries.try_emplace(key).first;
  shard.set(slot, std::move(value));
  key_appeared(slot, released);
}

// The next reader of a new key is often on the node that created it. So a client that asks for a lease gets one with
// its set.
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
  MUSTER_ASSIGN(reply.number, add_to_counter(key, exists ? *found->second.value : ByteView(), request.number));
  char text[24];
  const auto written = std::to_chars(std::begin(text), std::end(text), reply.number);
  if (exists) {
    found->second.value->assign(text, written.ptr);  // no waiter to release: no request waits for a key that exists
  } else {
    store(key, Bytes(text, written.ptr), released);
  }
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
  KeyExtras& extras = slot.second.ensure_extras();
  shard(key).queues += extras.queue.empty();
  extras.queue.push_back(std::move(request.values[0]));
  // Serves waiting pops before waits, so that no pop waits while the queue has items.
  for (const StoreOperation concerned : {StoreOperation::kQueuePop, StoreOperation::kWait}) {
    for (Waiter *waiter = extras.waiting.first, *next; waiter != nullptr; waiter = next) {
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
      // Releases waiters only after all keys are set, because a waiter for one key may read the other keys too.
      for (const Key& key : request.keys) key_appeared(slot(key), released);
      return {};
    default:
      return fail(ErrorCode::kUnsupported, "this store does not know the operation");
  }
}

// ---- requests that change nothing

bool is_scan(const Request& request) {
  return request.operation == StoreOperation::kListKeys ||
         (request.operation == StoreOperation::kNumKeys && !request.keys.empty());
}

// When a table grows, its keys move to other buckets. The scan then starts over with this table.
bool StoreState::scan(Scan& scan) const {
  const ShardLock lock(impl_->shards.get(), impl_->everywhere());
  const Key& prefix = scan.request.keys[0];
  const bool lists = scan.request.operation == StoreOperation::kListKeys;
  size_t left = kBucketsPerStep;
  for (; scan.shard < impl_->count; ++scan.shard, scan.bucket = 0) {
    const auto& entries = impl_->shards[scan.shard].entries;
    if (scan.bucket > 0 && entries.bucket_count() != scan.buckets) {
      scan.bucket = 0;
      scan.reply.keys.resize(scan.listed);
      scan.reply.number = scan.counted;
    }
    if (scan.bucket == 0) {
      scan.buckets = entries.bucket_count();
      scan.listed = scan.reply.keys.size();
      scan.counted = scan.reply.number;
    }
    for (; scan.bucket < scan.buckets; ++scan.bucket) {
      if (left-- == 0) return false;
      for (auto it = entries.begin(scan.bucket); it != entries.end(scan.bucket); ++it) {
        if (!it->second.value || !it->first.starts_with(prefix)) continue;
        if (lists) scan.reply.keys.push_back(it->first);
        if (!lists) ++scan.reply.number;
      }
    }
  }
  return true;
}

// ---- dispatch

void StoreState::Impl::run(Request&& request, ClientId client, Replies& out) {
  const size_t own = out.size();
  Reply reply{client, request.id};
  out.emplace_back();  // the place of the reply, before the replies to released waiters
  switch (request.operation) {
    case StoreOperation::kCheck:
      reply.number = missing(request, 0) == request.keys.size();
      break;
    case StoreOperation::kNumKeys:
      for (unsigned i = 0; i < count; ++i) reply.number += static_cast<int64_t>(shards[i].keys);
      break;
    case StoreOperation::kQueueLength:
      if (const Entry* found = shard(request.keys[0]).find(request.keys[0]); found != nullptr && found->extras) {
        reply.number = static_cast<int64_t>(found->extras->queue.size());
      }
      break;
    case StoreOperation::kBarrier:
      out.pop_back();  // the last caller's reply comes in the order of arrival
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
  if (request.operation == StoreOperation::kRelease) return release_leases(request, client, out);
  if (is_scan(request)) {
    Scan scan(std::move(request), client);
    while (!this->scan(scan)) continue;
    out.push_back(std::move(scan.reply));
    return;
  }
  // The waiters, and so their shards, are known only under the locks of the keys. If the release needs more shards, the
  // locks are released and all are taken again, because ShardLock takes them in ascending order.
  ShardMask mask = impl_->shards_of(request);
  while (true) {
    const ShardLock hold(impl_->shards.get(), mask);
    if (has(request.operation, kChangesKeys) && impl_->defer(request, client, out)) return;
    const ShardMask wanted =
        has_multi_shard_waiters(impl_->shards.get(), mask) ? mask | impl_->shards_of_released(request) : mask;
    if (wanted == mask) return impl_->run(std::move(request), client, out);
    mask = wanted;
  }
}

void StoreState::release_leases(const Request& request, ClientId client, Replies& out) {
  for (const Key& key : request.keys) {
    std::vector<DeferredRequest> freed;
    {
      Shard& shard = impl_->shard(key);
      const std::lock_guard lock(shard.mutex);
      if (shard.leases.release(key, client)) shard.take_deferred(key, freed);
    }
    retry(std::move(freed), out);
  }
}

uint64_t StoreState::revoke(ClientId client, Replies& out) {
  for (unsigned i = 0; i < impl_->count; ++i) {
    Shard& shard = impl_->shards[i];
    std::vector<DeferredRequest> freed;
    {
      const std::lock_guard lock(shard.mutex);
      std::vector<Key> keys;
      shard.leases.revoke(client, keys);
      for (const Key& key : keys) shard.take_deferred(key, freed);
    }
    retry(std::move(freed), out);
  }
  return impl_->revocations.fetch_add(1, std::memory_order_relaxed) + 1;  // see Impl::revocations
}

void StoreState::retry(std::vector<DeferredRequest> held, Replies& out) {
  for (DeferredRequest& request : held) apply(std::move(request.request), request.client, out);
}

// The lock of its home shard is enough to find a waiter, but its removal may need more locks. Once all locks are held,
// the search is repeated, because the waiter may be gone.
void StoreState::cancel(RequestId id, ClientId client, Replies& out) {
  for (unsigned i = 0; i < impl_->count; ++i) {
    Shard& home = impl_->shards[i];
    ShardMask mask = ShardMask{1} << i;
    while (true) {
      const ShardLock hold(impl_->shards.get(), mask);
      const auto waiter = home.waiters.find(WaiterName{client, id});
      const bool waits = waiter != home.waiters.end();
      if (!waits && !home.forget_deferred(client, id)) break;
      if (waits && (waiter->second.shards & ~mask) != 0) {
        mask |= waiter->second.shards;
        continue;
      }
      if (waits) impl_->forget(waiter->second);
      return out.push_back({client, id, cancelled()});
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
        impl_->shards[i].drop_deferred(client);
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
