#include "muster/store/proxy/proxy.h"

#include <algorithm>

#include "muster/store/proxy/proxy_parts.h"

namespace muster {

using proxy::Caller;
using proxy::Part;

namespace proxy {

RequestId Passthrough::submit(Request request, ClientId client) {
  const Caller caller{client, request.id};
  const bool answered = is_answered(request.operation);
  const RequestId id = out_.send(Part::kPlain, std::move(request));
  callers_[id] = caller;
  by_client_[client][caller.id] = {id, answered};
  return id;
}

bool Passthrough::has(const Caller& caller) const {
  const auto client = by_client_.find(caller.client);
  return client != by_client_.end() && client->second.contains(caller.id);
}

bool Passthrough::cancel(const Caller& caller) {
  if (!has(caller)) return false;
  out_.requests.push_back({StoreOperation::kCancel, by_client_.at(caller.client).at(caller.id).id});
  return true;
}

void Passthrough::drop(ClientId client) {
  const auto found = by_client_.extract(client);
  if (found.empty()) return;
  for (const auto& [theirs, ours] : found.mapped()) {
    callers_.erase(ours.id);
    if (ours.answered) out_.requests.push_back({StoreOperation::kCancel, ours.id});
  }
}

void Passthrough::receive(Reply reply) {
  const auto found = callers_.extract(reply.id);
  if (found.empty()) return;
  const Caller caller = found.mapped();
  const auto client = by_client_.find(caller.client);
  client->second.erase(caller.id);
  if (client->second.empty()) by_client_.erase(client);
  out_.answer(caller, std::move(reply));
}

void Passthrough::fail(const Error& why) {
  for (const auto& [id, caller] : callers_) out_.refuse(caller, why);
  callers_.clear();
  by_client_.clear();
}

}  // namespace proxy

namespace {

constexpr size_t kMaxPending = 1 << 18;
constexpr size_t kMaxKeptSet = 64 << 10;  // bytes of a value that is kept while it is on its way

bool reads(StoreOperation operation) {
  return operation == StoreOperation::kGet || operation == StoreOperation::kMultiGet ||
         operation == StoreOperation::kWait || operation == StoreOperation::kCheck;
}

}  // namespace

bool takes_back(StoreOperation operation) {
  return operation == StoreOperation::kCancel || operation == StoreOperation::kRelease ||
         operation == StoreOperation::kWithdraw;
}

struct Proxy::Impl {
  explicit Impl(const Options& given)
      : options(given), barriers(out, given.merge ? given.longest_hold : Duration{0}), reads(out, given) {}

  void submit(Request request, ClientId client, TimePoint now);
  void cancel(const Caller& caller);
  void forward(Request request, ClientId client);

  const Options options;
  proxy::Output out;
  proxy::Passthrough plain{out};
  proxy::Adds adds{out};
  proxy::Barriers barriers;
  proxy::Reads reads;
};

Proxy::Proxy(Options options) : impl_(std::make_unique<Impl>(options)) {}
Proxy::~Proxy() = default;
Proxy::Proxy(Proxy&&) noexcept = default;
Proxy& Proxy::operator=(Proxy&&) noexcept = default;

void Proxy::submit(Request request, ClientId client, TimePoint now) {
  const Caller caller{client, request.id};
  const bool answered = request.operation != StoreOperation::kCancel && request.operation != StoreOperation::kRelease;
  Result<> valid = validate(request);
  if (valid && !takes_back(request.operation) && pending() >= kMaxPending) {
    valid = muster::fail(ErrorCode::kResourceExhausted, "too many requests wait at this node's proxy");
  }
  if (valid) return impl_->submit(std::move(request), client, now);
  if (answered) impl_->out.refuse(caller, valid.error());
}

void Proxy::refuse(const Request& request, ClientId client, const Error& why) {
  impl_->out.refuse({client, request.id}, why);
}

void Proxy::Impl::submit(Request request, ClientId client, TimePoint now) {
  switch (request.operation) {
    case StoreOperation::kCancel:
      return cancel({client, request.id});
    case StoreOperation::kRelease:
      return reads.release(request, client);
    case StoreOperation::kWithdraw:
      return barriers.withdraw(request, client);
    case StoreOperation::kBarrier:
      return barriers.submit(std::move(request), client, now);
    default:
      break;
  }
  if (options.merge && muster::reads(request.operation)) return reads.submit(std::move(request), client, now);
  forward(std::move(request), client);
}

// What changes keys. They are given back first, so that the server need not ask for them.
void Proxy::Impl::forward(Request request, ClientId client) {
  const Caller caller{client, request.id};
  if (plain.has(caller))
    return out.refuse(caller, Error{ErrorCode::kProtocol, "a request of this number is already waiting"});
  const auto below = request.lease ? std::optional(client) : std::nullopt;
  request.lease = false;
  for (const Key& key : request.keys) {
    if (reads.holds(key)) reads.give_back(key);
  }
  if (options.merge && request.operation == StoreOperation::kAdd) return adds.submit(std::move(request), client);
  const bool keeps = options.merge && request.operation == StoreOperation::kSet &&
                     request.values[0].size() <= std::min(kMaxKeptSet, options.max_cached_bytes / 8);
  if (!keeps) return void(plain.submit(std::move(request), client));
  request.lease = true;
  Key key = request.keys[0];
  Bytes value = request.values[0];
  reads.expect(plain.submit(std::move(request), client), std::move(key), std::move(value), below);
}

void Proxy::Impl::cancel(const Caller& caller) {
  if (!reads.cancel(caller) && !barriers.cancel(caller)) plain.cancel(caller);
}

void Proxy::drop(ClientId client, TimePoint) {
  impl_->reads.drop(client);
  impl_->barriers.drop(client);
  impl_->plain.drop(client);
}

void Proxy::receive(Reply reply, TimePoint now) {
  if (reply.recall) {
    for (const Key& key : reply.keys) impl_->reads.give_back(key);
    return;
  }
  switch (proxy::part_of(reply.id)) {
    case Part::kPlain:
      reply.leased = impl_->reads.take_set(reply, now);
      reply.granted = impl_->reads.revocations();
      return impl_->plain.receive(std::move(reply));
    case Part::kAdd:
      return impl_->adds.receive(std::move(reply));
    case Part::kBarrier:
      return impl_->barriers.receive(std::move(reply));
    case Part::kRead:
      return impl_->reads.receive(std::move(reply), now);
  }
}

void Proxy::set_lease_end(TimePoint until, TimePoint now) { impl_->reads.set_lease_end(until, now); }
uint64_t Proxy::revoke(ClientId client) { return impl_->reads.revoke(client); }
uint64_t Proxy::grants_ended() const { return impl_->reads.grants_ended(); }
void Proxy::give_back_all() { impl_->reads.give_back_all(); }

std::vector<Request> Proxy::take_requests(TimePoint now) {
  impl_->adds.flush();
  impl_->barriers.flush(now);
  impl_->reads.flush();
  return std::exchange(impl_->out.requests, {});
}

Replies Proxy::take_replies() { return std::exchange(impl_->out.replies, {}); }
std::optional<TimePoint> Proxy::next_wake() const { return impl_->barriers.next_wake(); }

void Proxy::fail(const Error& why) {
  impl_->plain.fail(why);
  impl_->adds.fail(why);
  impl_->barriers.fail(why);
  impl_->reads.fail(why);
  impl_->out.requests.clear();
}

size_t Proxy::pending() const {
  return impl_->plain.pending() + impl_->adds.pending() + impl_->barriers.pending() + impl_->reads.pending();
}

int parent_of(int node, int nodes, int fanout) {
  if (node <= 0 || node >= nodes) return -1;
  return fanout < 1 ? 0 : (node - 1) / fanout;
}

}  // namespace muster
