#include "muster/store/state.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <deque>
#include <optional>
#include <set>
#include <unordered_map>

#include "muster/base/check.h"
#include "muster/store/stat.h"

namespace muster {
namespace {

// Waiters are numbered in the order in which they came: a std::set of them is a first-in-first-out queue from which
// any one can leave cheaply.
using WaiterId = uint64_t;

struct Waiter {
  ClientId client;
  Request request;
  size_t cursor = 0;  // the missing key it is indexed under; those before it were seen
};

struct Barrier {
  int64_t count;
  std::set<WaiterId> arrived;
};

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

}  // namespace

struct StoreState::Impl {
  std::unordered_map<Key, Bytes> data;
  std::unordered_map<Key, std::deque<Bytes>> queues;  // never an empty one
  std::unordered_map<Key, Barrier> barriers;          // never an empty one
  std::unordered_map<WaiterId, Waiter> waiters;
  std::unordered_map<Key, std::set<WaiterId>> waiting;
  std::unordered_map<ClientId, std::unordered_map<RequestId, WaiterId>> by_client;
  WaiterId next_waiter = 0;

  Replies run(Request&& request, ClientId client);
  Result<> write(Request& request, Reply& reply, Replies& released);
  void read(const Request& request, Reply& reply) const;

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
  Result<WaiterId> park(Request&& request, ClientId client);
  Result<> arrive(Request&& request, ClientId client, Replies& released);
  bool advance(WaiterId id, Replies& released);
  void release(WaiterId id, Replies& released);
  void forget(WaiterId id);
  void cancel(const Request& request, ClientId client, Replies& released);
  void key_appeared(const Key& key, Replies& released);
};

// ---- what changes the store

void StoreState::Impl::store(const Key& key, Bytes value, Replies& released) {
  data.insert_or_assign(key, std::move(value));
  key_appeared(key, released);
}

Result<> StoreState::Impl::compare_set(Request& request, Reply& reply, Replies& released) {
  const Key& key = request.keys[0];
  Bytes &expected = request.values[0], &desired = request.values[1];
  const auto found = data.find(key);
  const bool matches = found == data.end() ? expected.empty() : found->second == expected;
  if (matches) {
    reply.values.push_back(desired);
    store(key, std::move(desired), released);
  } else {
    reply.values.push_back(found == data.end() ? std::move(expected) : found->second);
  }
  return {};
}

Result<> StoreState::Impl::add(Request& request, Reply& reply, Replies& released) {
  const Key& key = request.keys[0];
  int64_t sum = 0;
  if (const auto found = data.find(key); found != data.end()) {
    MUSTER_ASSIGN(sum, parse_counter(key, found->second));
  }
  if (__builtin_add_overflow(sum, request.number, &sum)) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("adding {} to key \"{}\" would overflow 64 bits", request.number, key));
  }
  store(key, to_bytes(fmt::format("{}", sum)), released);
  reply.number = sum;
  return {};
}

Result<> StoreState::Impl::append(Request& request, Replies& released) {
  const Key& key = request.keys[0];
  Bytes& value = data[key];
  if (value.size() + request.values[0].size() > kMaxValueBytes) {
    return fail(ErrorCode::kResourceExhausted,
                fmt::format("append would grow key \"{}\" over {} bytes", key, kMaxValueBytes));
  }
  value.insert(value.end(), request.values[0].begin(), request.values[0].end());
  key_appeared(key, released);
  return {};
}

void StoreState::Impl::push(Request& request, Replies& released) {
  const Key& key = request.keys[0];
  queues[key].push_back(std::move(request.values[0]));
  const auto found = waiting.find(key);
  if (found == waiting.end()) return;
  const std::vector<WaiterId> candidates(found->second.begin(), found->second.end());
  // A caller of pop goes first: it takes the value, so that none ever waits while the queue holds something.
  for (const Operation concerned : {Operation::kQueuePop, Operation::kWait}) {
    for (const WaiterId id : candidates) {
      if (waiters.at(id).request.operation == concerned && advance(id, released)) return;
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
      reply.number = static_cast<int64_t>(data.erase(request.keys[0]));
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

void StoreState::Impl::read(const Request& request, Reply& reply) const {
  switch (request.operation) {
    case Operation::kCheck:
      reply.number = missing(request, 0) == request.keys.size();
      return;
    case Operation::kNumKeys:
      reply.number = request.keys.empty() ? static_cast<int64_t>(data.size())
                                          : std::count_if(data.begin(), data.end(), [&](const auto& entry) {
                                              return entry.first.starts_with(request.keys[0]);
                                            });
      return;
    case Operation::kStat: {
      StoreStat stat;
      stat.keys = data.size();
      stat.queues = queues.size();
      stat.waiters = waiters.size();
      return put_stat(stat, reply);
    }
    case Operation::kQueueLength: {
      const auto found = queues.find(request.keys[0]);
      reply.number = found == queues.end() ? 0 : static_cast<int64_t>(found->second.size());
      return;
    }
    default:
      break;
  }
  MUSTER_CHECK(request.operation == Operation::kListKeys, "not an operation that only looks");
  for (const auto& [key, value] : data) {
    if (key.starts_with(request.keys[0])) reply.keys.push_back(key);
  }
  std::sort(reply.keys.begin(), reply.keys.end());
}

// ---- what may wait

bool StoreState::Impl::present(Operation operation, const Key& key) const {
  if (operation == Operation::kQueuePop) return queues.contains(key);
  if (data.contains(key)) return true;
  const bool sees_queues = operation == Operation::kWait || operation == Operation::kCheck;
  return sees_queues && queues.contains(key);
}

// The first key from `from` on that is not there; the number of keys when all are.
size_t StoreState::Impl::missing(const Request& request, size_t from) const {
  while (from < request.keys.size() && present(request.operation, request.keys[from])) ++from;
  return from;
}

// Whether every key is there now. `cursor` moves on to the one to wait for, so that a waiter for many keys looks at
// each about once, and starts over only if one that it saw was deleted.
bool StoreState::Impl::ready(const Request& request, size_t& cursor) const {
  const size_t count = request.keys.size();
  const bool from_start = cursor == 0;
  cursor = missing(request, cursor);
  if (cursor == count && !from_start) cursor = missing(request, 0);
  return cursor == count;
}

// The reply of a get, multi_get, queue_pop, wait or barrier that has what it asked for (or does not insist).
void StoreState::Impl::answer(const Request& request, Reply& reply) {
  if (request.operation == Operation::kGet || request.operation == Operation::kMultiGet) {
    for (const Key& key : request.keys) {
      const auto found = data.find(key);
      reply.values.push_back(found == data.end() ? Bytes{} : found->second);
    }
  } else if (request.operation == Operation::kQueuePop) {
    const auto found = queues.find(request.keys[0]);
    if (found == queues.end()) return;
    reply.number = static_cast<int64_t>(found->second.size());
    reply.values.push_back(std::move(found->second.front()));
    found->second.pop_front();
    if (found->second.empty()) queues.erase(found);
  }
}

Result<WaiterId> StoreState::Impl::park(Request&& request, ClientId client) {
  auto& waits = by_client[client];
  if (waits.size() >= kMaxWaitsPerClient) {
    return fail(ErrorCode::kResourceExhausted,
                fmt::format("one client may wait for {} requests at a time, and this one does", kMaxWaitsPerClient));
  }
  const WaiterId id = next_waiter++;
  if (!waits.emplace(request.id, id).second) {
    return fail(ErrorCode::kProtocol, fmt::format("request number {} is already waiting", request.id));
  }
  waiters.emplace(id, Waiter{client, std::move(request)});
  return id;
}

// False if the request waits now, and its reply comes later.
bool StoreState::Impl::answer_or_wait(Request& request, Reply& reply) {
  size_t cursor = 0;
  if (request.immediate || ready(request, cursor)) {
    answer(request, reply);
    return true;
  }
  const auto id = park(std::move(request), reply.client);
  if (!id) {
    reply.status = tl::unexpected(id.error());
    return true;
  }
  Waiter& waiter = waiters.at(*id);
  waiter.cursor = cursor;
  waiting[waiter.request.keys[cursor]].insert(*id);
  return false;
}

Result<> StoreState::Impl::arrive(Request&& request, ClientId client, Replies& released) {
  const Key key = request.keys[0];
  const int64_t count = request.number;
  if (count < 1) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("barrier \"{}\" was given a count of {}, it takes 1 or more", key, count));
  }
  if (const auto found = barriers.find(key); found != barriers.end() && found->second.count != count) {
    return fail(ErrorCode::kMismatch,
                fmt::format("barrier \"{}\" was given a count of {}, but {} caller(s) already wait there for {}", key,
                            count, found->second.arrived.size(), found->second.count));
  }
  MUSTER_ASSIGN(const WaiterId id, park(std::move(request), client));
  Barrier& barrier = barriers.try_emplace(key, Barrier{count, {}}).first->second;
  barrier.arrived.insert(id);
  if (static_cast<int64_t>(barrier.arrived.size()) < count) return {};
  const std::set<WaiterId> all = barrier.arrived;
  for (const WaiterId arrived : all) release(arrived, released);
  return {};
}

// Lets a waiter look again. True if it was released; otherwise it waits for its next missing key.
bool StoreState::Impl::advance(WaiterId id, Replies& released) {
  Waiter& waiter = waiters.at(id);
  const size_t before = waiter.cursor;
  size_t cursor = before;
  if (ready(waiter.request, cursor)) {
    release(id, released);
    return true;
  }
  const auto old = waiting.find(waiter.request.keys[before]);
  old->second.erase(id);
  if (old->second.empty()) waiting.erase(old);
  waiter.cursor = cursor;
  waiting[waiter.request.keys[cursor]].insert(id);
  return false;
}

void StoreState::Impl::release(WaiterId id, Replies& released) {
  const Waiter& waiter = waiters.at(id);
  Reply reply{waiter.client, waiter.request.id};
  answer(waiter.request, reply);
  released.push_back(std::move(reply));
  forget(id);
}

void StoreState::Impl::forget(WaiterId id) {
  const Waiter& waiter = waiters.at(id);
  const Key& key = waiter.request.keys[waiter.cursor];
  if (waiter.request.operation == Operation::kBarrier) {
    const auto barrier = barriers.find(key);
    barrier->second.arrived.erase(id);
    if (barrier->second.arrived.empty()) barriers.erase(barrier);
  } else {
    const auto queue = waiting.find(key);
    queue->second.erase(id);
    if (queue->second.empty()) waiting.erase(queue);
  }
  const auto client = by_client.find(waiter.client);
  client->second.erase(waiter.request.id);
  if (client->second.empty()) by_client.erase(client);
  waiters.erase(id);
}

void StoreState::Impl::cancel(const Request& request, ClientId client, Replies& released) {
  const auto waits = by_client.find(client);
  if (waits == by_client.end()) return;
  const auto found = waits->second.find(request.id);
  if (found == waits->second.end()) return;
  forget(found->second);
  released.push_back({client, request.id, fail(ErrorCode::kAborted, "the request was cancelled by its client")});
}

void StoreState::Impl::key_appeared(const Key& key, Replies& released) {
  const auto found = waiting.find(key);
  if (found == waiting.end()) return;
  const std::vector<WaiterId> candidates(found->second.begin(), found->second.end());
  for (const WaiterId id : candidates) {
    if (waiters.at(id).request.operation != Operation::kQueuePop) advance(id, released);
  }
}

// ---- dispatch

Replies StoreState::Impl::run(Request&& request, ClientId client) {
  Reply reply{client, request.id};
  Replies released;
  reply.status = validate(request);
  if (reply.status) {
    switch (request.operation) {
      case Operation::kCancel:
        cancel(request, client, released);
        return released;
      case Operation::kCheck:
      case Operation::kNumKeys:
      case Operation::kQueueLength:
      case Operation::kListKeys:
      case Operation::kStat:
        read(request, reply);
        break;
      case Operation::kBarrier:
        reply.status = arrive(std::move(request), client, released);
        if (reply.status) return released;
        break;
      case Operation::kGet:
      case Operation::kMultiGet:
      case Operation::kQueuePop:
      case Operation::kWait:
        if (!answer_or_wait(request, reply)) return released;
        break;
      default:
        reply.status = write(request, reply, released);
        break;
    }
  }
  released.insert(released.begin(), std::move(reply));
  return released;
}

StoreState::StoreState() : impl_(std::make_unique<Impl>()) {}
StoreState::~StoreState() = default;

Replies StoreState::apply(Request request, ClientId client) { return impl_->run(std::move(request), client); }

void StoreState::drop(ClientId client) {
  const auto waits = impl_->by_client.find(client);
  if (waits == impl_->by_client.end()) return;
  const auto requests = waits->second;
  for (const auto& [request, waiter] : requests) impl_->forget(waiter);
}

size_t StoreState::waiters() const { return impl_->waiters.size(); }

}  // namespace muster
