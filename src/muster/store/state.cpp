#include "muster/store/state.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>

#include "muster/base/check.h"
#include "muster/store/shard.h"
#include "muster/store/stat.h"

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

bool writes(Operation operation) {
  switch (operation) {
    case Operation::kSet:
    case Operation::kCompareSet:
    case Operation::kAdd:
    case Operation::kAppend:
    case Operation::kQueuePush:
    case Operation::kMultiSet:
      return true;
    default:
      return false;
  }
}

}  // namespace

// Every function but those of StoreState itself is called with the shards concerned held.
struct StoreState::Impl {
  explicit Impl(unsigned shard_count) : count(shard_count), shards(std::make_unique<Shard[]>(shard_count)) {}

  const unsigned count;
  const std::unique_ptr<Shard[]> shards;

  unsigned index(const Key& key) const { return count == 1 ? 0 : std::hash<Key>()(key) % count; }
  Shard& shard(const Key& key) const { return shards[index(key)]; }
  Shard& home(const Waiter& waiter) const { return shards[std::countr_zero(waiter.shards)]; }
  Slot& slot(const Key& key) const { return *shard(key).entries.try_emplace(key).first; }
  ShardMask everywhere() const { return count == kMaxShards ? ~ShardMask{0} : (ShardMask{1} << count) - 1; }
  ShardMask shards_of(const Request& request) const;
  ShardMask shards_of_released(const Request& request) const;

  void run(Request&& request, ClientId client, Replies& out);
  Result<> write(Request& request, Reply& reply, Replies& released);
  void read(const Request& request, Reply& reply) const;
  int64_t count_keys(const Request& request) const;
  void list_keys(const Key& prefix, Reply& reply) const;

  Result<> compare_set(Request& request, Reply& reply, Replies& released);
  Result<> add(Request& request, Reply& reply, Replies& released);
  Result<> append(Request& request, Replies& released);
  void push(Request& request, Replies& released);
  void store(const Key& key, Bytes value, Replies& released);

  bool present(Operation operation, const Key& key) const;
  size_t missing(const Request& request, size_t from) const;
  bool ready(const Request& request, size_t& cursor) const;
  void answer(const Request& request, Reply& reply);
  bool answer_or_wait(Request& request, Reply& reply);
  Result<> arrive(Request&& request, ClientId client, Replies& released);
  bool advance(Waiter& waiter, Replies& released);
  void release(Waiter& waiter, Replies& released);
  void forget(Waiter& waiter);
  void key_appeared(Slot& slot, Replies& released);
};

namespace {

// The locks of some shards, taken in the order of their numbers.
class Hold {
 public:
  Hold(Shard* shards, ShardMask mask) : shards_(shards), mask_(mask) {
    for (ShardMask rest = mask_; rest != 0; rest &= rest - 1) shards_[std::countr_zero(rest)].mutex.lock();
  }
  ~Hold() {
    for (ShardMask rest = mask_; rest != 0; rest &= rest - 1) shards_[std::countr_zero(rest)].mutex.unlock();
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

 private:
  Shard* shards_;
  ShardMask mask_;
};

}  // namespace

ShardMask StoreState::Impl::shards_of(const Request& request) const {
  if (request.operation == Operation::kNumKeys || request.operation == Operation::kListKeys) return everywhere();
  ShardMask mask = 0;
  for (const Key& key : request.keys) mask |= ShardMask{1} << index(key);
  return mask;
}

// Who waits for a key that the request writes may wait for keys of other shards too, and is released with all held.
ShardMask StoreState::Impl::shards_of_released(const Request& request) const {
  ShardMask mask = 0;
  if (!writes(request.operation)) return mask;
  for (const Key& key : request.keys) {
    Shard& shard = this->shard(key);
    const Entry* entry = shard.wide == 0 ? nullptr : shard.find(key);
    if (entry != nullptr && entry->place) mask |= entry->place->shards;
  }
  return mask;
}

// ---- what changes the store

void StoreState::Impl::store(const Key& key, Bytes value, Replies& released) {
  Slot& slot = this->slot(key);
  shard(key).set(slot, std::move(value));
  key_appeared(slot, released);
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
  int64_t sum = 0;
  if (const Entry* found = shard(key).find(key); found != nullptr && found->value) {
    MUSTER_ASSIGN(sum, parse_counter(key, *found->value));
  }
  if (__builtin_add_overflow(sum, request.number, &sum)) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("adding {} to key \"{}\" would overflow 64 bits", request.number, key));
  }
  char text[24];
  const auto written = std::to_chars(std::begin(text), std::end(text), sum);
  store(key, Bytes(text, written.ptr), released);
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
  Place& place = slot.second.beside();
  shard(key).queues += place.queue.empty();
  place.queue.push_back(std::move(request.values[0]));
  // A caller of pop goes first: it takes the value, so that none ever waits while the queue holds something.
  for (const Operation concerned : {Operation::kQueuePop, Operation::kWait}) {
    for (Waiter *waiter = place.waiting.first, *next; waiter != nullptr; waiter = next) {
      next = waiter->next;
      if (waiter->request.operation == concerned && advance(*waiter, released)) return;
    }
  }
}

Result<> StoreState::Impl::write(Request& request, Reply& reply, Replies& released) {
  switch (request.operation) {
    case Operation::kSet:
      store(request.keys[0], std::move(request.values[0]), released);
      return {};
    case Operation::kCompareSet:
      return compare_set(request, reply, released);
    case Operation::kAdd:
      return add(request, reply, released);
    case Operation::kAppend:
      return append(request, released);
    case Operation::kDelete:
      reply.number = shard(request.keys[0]).erase(request.keys[0]);
      return {};
    case Operation::kQueuePush:
      push(request, released);
      return {};
    case Operation::kMultiSet:
      for (size_t i = 0; i < request.keys.size(); ++i) {
        store(request.keys[i], std::move(request.values[i]), released);
      }
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
    case Operation::kCheck:
      reply.number = missing(request, 0) == request.keys.size();
      return;
    case Operation::kNumKeys:
      reply.number = count_keys(request);
      return;
    case Operation::kListKeys:
      return list_keys(request.keys[0], reply);
    case Operation::kQueueLength: {
      const Entry* found = shard(request.keys[0]).find(request.keys[0]);
      reply.number = found != nullptr && found->place ? static_cast<int64_t>(found->place->queue.size()) : 0;
      return;
    }
    default:
      MUSTER_CHECK(false, "not an operation that only looks");
  }
}

// ---- what may wait

bool StoreState::Impl::present(Operation operation, const Key& key) const {
  const Entry* found = shard(key).find(key);
  if (found == nullptr) return false;
  if (operation == Operation::kQueuePop) return found->has_queue();
  const bool sees_queues = operation == Operation::kWait || operation == Operation::kCheck;
  return found->value || (sees_queues && found->has_queue());
}

// The first key from `from` on that is not there; the number of keys when all are.
size_t StoreState::Impl::missing(const Request& request, size_t from) const {
  while (from < request.keys.size() && present(request.operation, request.keys[from])) ++from;
  return from;
}

// Whether every key is there now. `cursor` moves on to the one to wait for, so that a waiter for many keys looks at
// each about once, and starts over only if one that it saw was deleted.
bool StoreState::Impl::ready(const Request& request, size_t& cursor) const {
  const size_t keys = request.keys.size();
  const bool from_start = cursor == 0;
  cursor = missing(request, cursor);
  if (cursor == keys && !from_start) cursor = missing(request, 0);
  return cursor == keys;
}

// The reply of a get, multi_get, queue_pop, wait or barrier that has what it asked for (or does not insist).
void StoreState::Impl::answer(const Request& request, Reply& reply) {
  if (request.operation == Operation::kGet || request.operation == Operation::kMultiGet) {
    reply.values.reserve(request.keys.size());
    for (const Key& key : request.keys) {
      const Entry* found = shard(key).find(key);
      reply.values.push_back(found != nullptr && found->value ? *found->value : Bytes{});
    }
  } else if (request.operation == Operation::kQueuePop) {
    Shard& shard = this->shard(request.keys[0]);
    const auto found = shard.entries.find(request.keys[0]);
    if (found == shard.entries.end() || !found->second.has_queue()) return;
    reply.number = static_cast<int64_t>(found->second.place->queue.size());
    reply.values.push_back(shard.pop(*found));
  }
}

// False if the request waits now, and its reply comes later.
bool StoreState::Impl::answer_or_wait(Request& request, Reply& reply) {
  size_t cursor = 0;
  if (request.immediate || ready(request, cursor)) {
    answer(request, reply);
    if (request.operation == Operation::kQueuePop && !reply.values.empty()) {
      shard(request.keys[0]).tidy(slot(request.keys[0]));
    }
    return true;
  }
  const ShardMask mask = shards_of(request);
  const auto waiter = shards[std::countr_zero(mask)].take_in(std::move(request), reply.client, mask);
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
  if (wanted < 1) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("barrier \"{}\" was given a count of {}, it takes 1 or more", key, wanted));
  }
  Shard& shard = this->shard(key);
  const Entry* found = shard.find(key);
  if (found != nullptr && found->place && found->place->arrivals > 0 && found->place->barrier_count != wanted) {
    return fail(ErrorCode::kMismatch,
                fmt::format("barrier \"{}\" was given a count of {}, but {} caller(s) already wait there for {}", key,
                            wanted, found->place->arrivals, found->place->barrier_count));
  }
  MUSTER_ASSIGN(Waiter* const waiter, shard.take_in(std::move(request), client, shards_of(request)));
  Slot& slot = this->slot(waiter->request.keys[0]);
  shard.list(*waiter, slot);
  Place& place = *slot.second.place;
  place.barrier_count = wanted;
  if (place.arrivals < wanted) return {};
  for (Waiter *arrived = place.arrived.first, *next; arrived != nullptr; arrived = next) {
    next = arrived->next;
    release(*arrived, released);
  }
  return {};
}

// Lets a waiter look again. True if it was released; otherwise it waits for its next missing key.
bool StoreState::Impl::advance(Waiter& waiter, Replies& released) {
  size_t cursor = waiter.cursor;
  if (ready(waiter.request, cursor)) {
    release(waiter, released);
    return true;
  }
  if (cursor == waiter.cursor) return false;
  shard(waiter.at->first).unlist(waiter);
  const Key& key = waiter.request.keys[cursor];
  waiter.cursor = cursor;
  shard(key).list(waiter, slot(key));
  return false;
}

void StoreState::Impl::release(Waiter& waiter, Replies& released) {
  Reply reply{waiter.client, waiter.request.id};
  answer(waiter.request, reply);
  released.push_back(std::move(reply));
  forget(waiter);
}

void StoreState::Impl::forget(Waiter& waiter) {
  shard(waiter.at->first).unlist(waiter);
  home(waiter).put_out(waiter);
}

void StoreState::Impl::key_appeared(Slot& slot, Replies& released) {
  if (!slot.second.place) return;
  for (Waiter *waiter = slot.second.place->waiting.first, *next; waiter != nullptr; waiter = next) {
    next = waiter->next;
    if (waiter->request.operation != Operation::kQueuePop) advance(*waiter, released);
  }
}

// ---- dispatch

void StoreState::Impl::run(Request&& request, ClientId client, Replies& out) {
  const size_t own = out.size();
  Reply reply{client, request.id};
  out.emplace_back();  // its place is before those that it releases
  switch (request.operation) {
    case Operation::kCheck:
    case Operation::kNumKeys:
    case Operation::kQueueLength:
    case Operation::kListKeys:
      read(request, reply);
      break;
    case Operation::kBarrier:
      out.pop_back();  // the one that releases is released like the others
      reply.status = arrive(std::move(request), client, out);
      if (reply.status) return;
      out.emplace_back();
      break;
    case Operation::kGet:
    case Operation::kMultiGet:
    case Operation::kQueuePop:
    case Operation::kWait:
      if (answer_or_wait(request, reply)) break;
      return out.pop_back();
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
  if (request.operation == Operation::kCancel) return cancel(request.id, client, out);
  if (request.operation == Operation::kStat) {
    out.push_back({client, request.id});
    return put_stat(stat(), out.back());
  }
  ShardMask mask = impl_->shards_of(request);
  while (true) {
    const Hold hold(impl_->shards.get(), mask);
    const ShardMask wanted = mask | impl_->shards_of_released(request);
    if (wanted == mask) return impl_->run(std::move(request), client, out);
    mask = wanted;
  }
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
      const Hold hold(impl_->shards.get(), mask);
      Waiter* waiter = find(impl_->shards[i]);
      if (waiter == nullptr) break;
      const ShardMask wanted = mask | waiter->shards;
      if (wanted == mask) {
        impl_->forget(*waiter);
        out.push_back({client, id, fail(ErrorCode::kAborted, "the request was cancelled by its client")});
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
      const Hold hold(impl_->shards.get(), mask);
      const auto found = impl_->shards[i].by_client.find(client);
      if (found == impl_->shards[i].by_client.end()) break;
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
    const Hold hold(impl_->shards.get(), ShardMask{1} << i);
    stat.keys += impl_->shards[i].keys;
    stat.queues += impl_->shards[i].queues;
    stat.waiters += impl_->shards[i].waiters.size();
  }
  return stat;
}

size_t StoreState::waiters() const { return stat().waiters; }

}  // namespace muster
