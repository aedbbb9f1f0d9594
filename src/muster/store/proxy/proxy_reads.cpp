#include <algorithm>

#include "muster/store/proxy/proxy_parts.h"

namespace muster::proxy {
namespace {

constexpr size_t kMaxKeysPerRelease = 4096;

bool wants_values(StoreOperation operation) {
  return operation == StoreOperation::kGet || operation == StoreOperation::kMultiGet;
}

std::vector<Key> unique_keys(const std::vector<Key>& keys) {
  if (keys.size() < 2) return keys;
  std::vector<Key> unique;
  std::unordered_set<std::string_view> seen;
  for (const Key& key : keys) {
    if (seen.insert(key).second) unique.push_back(key);
  }
  return unique;
}

}  // namespace

void Reads::submit(Request request, ClientId client, TimePoint now) {
  const Caller caller{client, request.id};
  const auto [added, is_new] = readers_.try_emplace(caller, Reader{caller, std::move(request), {}});
  if (!is_new) {
    return out_.refuse(caller, Error{ErrorCode::kProtocol, "a request of this number is already waiting"});
  }
  const Reader& reader = added->second;
  if (answer_from_cache(reader, now)) return void(readers_.erase(caller));
  if (reader.request.immediate || reader.request.operation == StoreOperation::kCheck) return read_alone(caller);
  const bool with_values = wants_values(reader.request.operation);
  std::vector<Key> missing = unique_keys(reader.request.keys);
  if (now < lease_end_) std::erase_if(missing, [&](const Key& key) { return usable(key, with_values); });
  join(caller, std::move(missing));
}

bool Reads::usable(const Key& key, bool with_value) const {
  const auto found = cache_.find(key);
  return found != cache_.end() && (!with_value || found->second.value);
}

bool Reads::answer_from_cache(const Reader& reader, TimePoint now) {
  if (now >= lease_end_) return false;
  const Request& request = reader.request;
  const bool with_values = wants_values(request.operation);
  if (!std::all_of(request.keys.begin(), request.keys.end(),
                   [&](const Key& key) { return usable(key, with_values); })) {
    return false;
  }
  Reply reply;
  for (const Key& key : request.keys) {
    Cached& cached = cache_.at(key);
    lru_.splice(lru_.begin(), lru_, cached.age);
    if (with_values) reply.values.push_back(*cached.value);
  }
  if (request.operation == StoreOperation::kCheck) reply.number = 1;
  grant(reader, reply);
  out_.answer(reader.caller, std::move(reply));
  return true;
}

// Grants a client that is a proxy leases of keys that this proxy holds leases of.
void Reads::grant(const Reader& reader, Reply& reply) {
  const auto& keys = reader.request.keys;
  reply.leased = reader.request.lease && !keys.empty() && std::all_of(keys.begin(), keys.end(), [&](const Key& key) {
                   return cache_.contains(key) && below_.leasable(key);
                 });
  if (!reply.leased) return;
  for (const Key& key : keys) below_.grant(key, reader.caller.client);
  reply.granted = revocations_;
}

// ---- fetches

// Returns the unfinished fetches whose keys are all in `keys`. A fetch that also waits for another key may never end.
std::vector<RequestId> Reads::joinable(const std::vector<Key>& keys, bool with_values) const {
  std::map<RequestId, size_t> covers;
  for (const Key& key : keys) {
    const auto found = fetching_.find(key);
    if (found == fetching_.end()) continue;
    for (const RequestId id : found->second) ++covers[id];
  }
  std::vector<RequestId> result;
  for (const auto& [id, count] : covers) {
    const Fetch& fetch = fetches_.at(id);
    const bool brings = !with_values || wants_values(fetch.request.operation) || fetch.request.keys.size() == 1;
    if (count == fetch.request.keys.size() && brings && !fetch.stale) result.push_back(id);
  }
  return result;
}

void Reads::join(const Caller& caller, std::vector<Key> missing) {
  const Reader& reader = readers_.at(caller);
  const bool with_values = wants_values(reader.request.operation);
  std::unordered_set<std::string_view> covered;
  for (const RequestId fetch : joinable(missing, with_values)) {
    const auto& brought = fetches_.at(fetch).request.keys;
    if (std::all_of(brought.begin(), brought.end(), [&](const Key& key) { return covered.contains(key); })) continue;
    attach(caller, fetch);
    covered.insert(brought.begin(), brought.end());
  }
  std::erase_if(missing, [&](const Key& key) { return covered.contains(key); });
  if (missing.empty()) return;
  const auto operation =
      with_values ? missing.size() == 1 ? StoreOperation::kGet : StoreOperation::kMultiGet : StoreOperation::kWait;
  attach(caller, start({.operation = operation, .keys = std::move(missing)}, /*shared=*/true));
}

void Reads::attach(const Caller& caller, RequestId fetch_id) {
  Reader& reader = readers_.at(caller);
  Fetch& fetch = fetches_.at(fetch_id);
  reader.fetches.insert(fetch_id);
  fetch.readers.insert(caller);
  // If this fetch brings all keys of the reader, then it is the reader's only fetch.
  const bool brings_all = unique_keys(reader.request.keys).size() == fetch.request.keys.size();
  const bool brings_values = wants_values(fetch.request.operation) || !wants_values(reader.request.operation);
  if (!fetch.sent && brings_all && brings_values) fetch.initiators.insert(caller);
}

void Reads::read_alone(const Caller& caller) {
  const RequestId fetch = start(readers_.at(caller).request, /*shared=*/false);
  attach(caller, fetch);
  fetches_.at(fetch).initiators.insert(caller);
}

RequestId Reads::start(Request request, bool shared) {
  request.lease = request.operation != StoreOperation::kCheck;
  request.weight = 1;
  const RequestId id = out_.send(Part::kRead, request);
  if (shared) {
    for (const Key& key : request.keys) fetching_[key].push_back(id);
  }
  Fetch& fetch = fetches_[id];
  fetch.request = std::move(request);
  fetch.shared = shared;
  unsent_.push_back(id);
  return id;
}

Reads::Fetch Reads::close(RequestId id) {
  Fetch fetch = std::move(fetches_.extract(id).mapped());
  if (!fetch.shared) return fetch;
  for (const Key& key : fetch.request.keys) {
    const auto entry = fetching_.find(key);
    std::erase(entry->second, id);
    if (entry->second.empty()) fetching_.erase(entry);
  }
  return fetch;
}

void Reads::receive(Reply reply, TimePoint now) {
  if (!fetches_.contains(reply.id)) return;
  const Fetch fetch = close(reply.id);
  if (reply.leased && !fetch.stale && now < lease_end_) install(fetch, reply);
  for (const Caller& caller : fetch.readers) {
    Reader& reader = readers_.at(caller);
    reader.fetches.erase(reply.id);
    if (fetch.initiators.contains(caller)) {
      answer_initiator(reader, fetch, reply);
      leave(caller);
    } else if (reader.fetches.empty() && answer_from_cache(reader, now)) {
      readers_.erase(caller);
    } else if (reader.fetches.empty()) {
      read_alone(caller);
    }
  }
}

void Reads::answer_initiator(const Reader& initiator, const Fetch& fetch, const Reply& reply) {
  if (!reply.status) return out_.refuse(initiator.caller, reply.status.error());
  Reply mine;
  mine.number = reply.number;
  if (!wants_values(initiator.request.operation)) {
    // A wait or a check returns no values.
  } else if (initiator.request.keys == fetch.request.keys) {
    mine.values = reply.values;
  } else {
    std::unordered_map<std::string_view, size_t> index_of;
    for (size_t i = 0; i < fetch.request.keys.size(); ++i) index_of[fetch.request.keys[i]] = i;
    for (const Key& key : initiator.request.keys) mine.values.push_back(reply.values.at(index_of.at(key)));
  }
  if (reply.leased) grant(initiator, mine);
  out_.answer(initiator.caller, std::move(mine));
}

// ---- readers that leave

bool Reads::cancel(const Caller& caller) {
  if (!readers_.contains(caller)) return false;
  out_.abort(caller);
  leave(caller);
  return true;
}

void Reads::drop(ClientId client) {
  for (auto it = readers_.lower_bound({client, 0}); it != readers_.end() && it->first.client == client;) {
    leave((it++)->first);
  }
  for (auto& [id, set] : sets_) {
    if (set.below == client) set.below.reset();
  }
}

void Reads::leave(const Caller& caller) {
  const auto reader = readers_.extract(caller);
  for (const RequestId fetch_id : reader.mapped().fetches) {
    Fetch& fetch = fetches_.at(fetch_id);
    fetch.readers.erase(reader.key());
    fetch.initiators.erase(reader.key());
    if (!fetch.readers.empty()) continue;
    close(fetch_id);
    out_.requests.push_back({StoreOperation::kCancel, fetch_id});
  }
}

// ---- leases

void Reads::install(const Fetch& fetch, const Reply& reply) {
  const auto& keys = fetch.request.keys;
  const bool with_values = reply.values.size() == keys.size();
  for (size_t i = 0; i < keys.size(); ++i) {
    if (recalled_.contains(keys[i])) continue;
    const bool fits = with_values && reply.values[i].size() <= options_.max_cached_bytes / 8;
    if (fits || !cache_.contains(keys[i])) keep(keys[i], fits ? std::optional(reply.values[i]) : std::nullopt);
  }
  make_room();
}

void Reads::keep(const Key& key, std::optional<Bytes> value) {
  uncache(key);
  lru_.push_front(key);
  cached_bytes_ += key.size() + (value ? value->size() : 0);
  cache_[key] = {std::move(value), lru_.begin()};
}

void Reads::make_room() {
  while (cached_bytes_ > options_.max_cached_bytes || cache_.size() > options_.max_cached_keys) {
    give_back(Key(lru_.back()));
  }
}

void Reads::uncache(const Key& key) {
  const auto found = cache_.find(key);
  if (found == cache_.end()) return;
  cached_bytes_ -= key.size() + (found->second.value ? found->second.value->size() : 0);
  lru_.erase(found->second.age);
  cache_.erase(found);
}

void Reads::expect(RequestId set, Key key, Bytes value, std::optional<ClientId> below) {
  latest_set_[key] = set;
  sets_[set] = {std::move(key), std::move(value), below};
}

bool Reads::take_set(const Reply& reply, TimePoint now) {
  auto taken = sets_.extract(reply.id);
  if (taken.empty()) return false;
  Set& set = taken.mapped();
  latest_set_.erase(set.key);
  if (!reply.leased || now >= lease_end_ || recalled_.contains(set.key)) return false;
  keep(set.key, std::move(set.value));
  make_room();
  return set.below && cache_.contains(set.key) && below_.grant(set.key, *set.below);
}

// After a proxy has given back its lease of a key, it must not accept a new lease from a reply that the server sent
// earlier. So all fetches of the key that are on their way become stale.
void Reads::give_back(const Key& key) {
  uncache(key);
  if (const auto set = latest_set_.extract(key); !set.empty()) sets_.erase(set.mapped());
  const auto fetches = fetching_.find(key);
  if (fetches != fetching_.end()) {
    for (const RequestId id : fetches->second) fetches_.at(id).stale = fetches_.at(id).sent;
  }
  for (auto& [id, fetch] : fetches_) {
    if (fetch.shared || !fetch.sent || fetch.stale) continue;
    const auto& keys = fetch.request.keys;
    fetch.stale = std::find(keys.begin(), keys.end(), key) != keys.end();
  }
  if (recalled_.contains(key)) return;
  if (below_.recall(key, out_.replies)) {
    giving_back_.insert(key);
  } else {
    recalled_.insert(key);
  }
}

void Reads::give_back_all() {
  while (!cache_.empty()) give_back(Key(lru_.back()));
  for (auto& [id, fetch] : fetches_) fetch.stale = fetch.stale || fetch.sent;
  sets_.clear();
  latest_set_.clear();
}

void Reads::freed(const std::vector<Key>& keys) {
  for (const Key& key : keys) {
    if (recalled_.erase(key) > 0) giving_back_.insert(key);
  }
}

void Reads::release(const Request& request, ClientId client) {
  std::vector<Key> keys;
  for (const Key& key : request.keys) {
    if (below_.release(key, client)) keys.push_back(key);
  }
  freed(keys);
}

uint64_t Reads::revoke(ClientId client) {
  std::vector<Key> keys;
  below_.revoke(client, keys);
  freed(keys);
  return ++revocations_;
}

void Reads::set_lease_end(TimePoint until, TimePoint now) {
  if (now >= lease_end_) {
    // The leases of the proxies below have ended too, because they never last longer than this proxy's leases.
    cache_.clear();
    lru_.clear();
    cached_bytes_ = 0;
    below_ = {};
    grants_ended_ = ++revocations_;
    giving_back_.insert(recalled_.begin(), recalled_.end());
    recalled_.clear();
  }
  lease_end_ = std::max(lease_end_, until);
}

void Reads::flush() {
  for (const RequestId id : unsent_) {
    if (const auto fetch = fetches_.find(id); fetch != fetches_.end()) fetch->second.sent = true;
  }
  unsent_.clear();
  std::vector<Request> words;
  for (const Key& key : giving_back_) {
    if (words.empty() || words.back().keys.size() == kMaxKeysPerRelease) words.push_back({StoreOperation::kRelease});
    words.back().keys.push_back(key);
  }
  giving_back_.clear();
  // Releases go before all other requests. Otherwise a release could end a lease that a later request for the same key
  // has just got.
  out_.requests.insert(out_.requests.begin(), std::make_move_iterator(words.begin()),
                       std::make_move_iterator(words.end()));
}

void Reads::fail(const Error& why) {
  for (const auto& [caller, reader] : readers_) out_.refuse(caller, why);
  readers_.clear();
  fetches_.clear();
  fetching_.clear();
  unsent_.clear();
  sets_.clear();
  latest_set_.clear();
  cache_.clear();
  lru_.clear();
  cached_bytes_ = 0;
  lease_end_ = TimePoint{INT64_MIN};
}

}  // namespace muster::proxy
