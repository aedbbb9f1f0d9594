#include "muster/store/proxy/proxy.h"

#include <algorithm>

namespace muster {

using proxy::Caller;
using proxy::Part;

namespace proxy {

RequestId Passthrough::submit(Request request, ClientId client) {
  const Caller caller{client, request.id};
  const bool answered = !muster::has(request.operation, kNoTorchReply);
  const RequestId id = out_.send(Part::kPassthrough, std::move(request));
  callers_[id] = caller;
  sent_[caller] = {id, answered};
  return id;
}

void Passthrough::cancel(const Caller& caller) {
  if (has(caller)) out_.requests.push_back({StoreOperation::kCancel, sent_.at(caller).id});
}

void Passthrough::drop(ClientId client) {
  auto sent = sent_.lower_bound({client, 0});
  for (; sent != sent_.end() && sent->first.client == client; sent = sent_.erase(sent)) {
    callers_.erase(sent->second.id);
    if (sent->second.answered) out_.requests.push_back({StoreOperation::kCancel, sent->second.id});
  }
}

void Passthrough::receive(Reply reply) {
  const auto found = callers_.extract(reply.id);
  if (found.empty()) return;
  sent_.erase(found.mapped());
  out_.answer(found.mapped(), std::move(reply));
}

void Passthrough::fail(const Error& why) {
  for (const auto& [id, caller] : callers_) out_.refuse(caller, why);
  callers_.clear();
  sent_.clear();
}

}  // namespace proxy

namespace {

constexpr size_t kMaxPending = 1 << 18;
constexpr size_t kMaxKeptSet = 64 << 10;  // bytes; the largest value that a proxy keeps while its set is unanswered

}  // namespace

Proxy::Proxy(Options options)
    : options_(options), barriers_(out_, options.merge ? options.max_hold : Duration{0}), reads_(out_, options) {}

void Proxy::submit(Request request, ClientId client, TimePoint now) {
  const Caller caller{client, request.id};
  Result<> valid = validate(request);
  if (valid && !has(request.operation, kTakesBack) && pending() >= kMaxPending) {
    valid = muster::fail(ErrorCode::kResourceExhausted, "too many requests wait at this node's proxy");
  }
  switch (request.operation) {
    case StoreOperation::kCancel:
      if (valid && !reads_.cancel(caller) && !barriers_.cancel(caller)) passthrough_.cancel(caller);
      return;
    case StoreOperation::kRelease:
      if (valid) reads_.release(request, client);
      return;
    default:
      break;
  }
  if (!valid) return out_.refuse(caller, valid.error());
  if (request.operation == StoreOperation::kWithdraw) return barriers_.withdraw(request, client);
  if (request.operation == StoreOperation::kBarrier) return barriers_.submit(std::move(request), client, now);
  if (options_.merge && has(request.operation, kReadsKeys)) return reads_.submit(std::move(request), client, now);
  forward(std::move(request), client);
}

// Gives back the leases of the request's keys first, so the server does not have to recall them.
void Proxy::forward(Request request, ClientId client) {
  const Caller caller{client, request.id};
  if (passthrough_.has(caller))
    return out_.refuse(caller, Error{ErrorCode::kProtocol, "a request of this number is already waiting"});
  const auto below = request.lease ? std::optional(client) : std::nullopt;
  request.lease = false;
  for (const Key& key : request.keys) {
    if (reads_.holds(key)) reads_.give_back(key);
  }
  if (options_.merge && request.operation == StoreOperation::kAdd) return adds_.submit(std::move(request), client);
  const bool keeps = options_.merge && request.operation == StoreOperation::kSet &&
                     request.values[0].size() <= std::min(kMaxKeptSet, options_.max_cached_bytes / 8);
  if (!keeps) return void(passthrough_.submit(std::move(request), client));
  request.lease = true;
  Key key = request.keys[0];
  Bytes value = request.values[0];
  reads_.expect(passthrough_.submit(std::move(request), client), std::move(key), std::move(value), below);
}

void Proxy::drop(ClientId client) {
  reads_.drop(client);
  barriers_.drop(client);
  passthrough_.drop(client);
}

void Proxy::receive(Reply reply, TimePoint now) {
  if (reply.recall) {
    for (const Key& key : reply.keys) reads_.give_back(key);
    return;
  }
  switch (proxy::part_of(reply.id)) {
    case Part::kPassthrough:
      reply.leased = reads_.take_set(reply, now);
      reply.granted = reads_.revocations();
      return passthrough_.receive(std::move(reply));
    case Part::kAdd:
      return adds_.receive(std::move(reply));
    case Part::kBarrier:
      return barriers_.receive(std::move(reply));
    case Part::kRead:
      return reads_.receive(std::move(reply), now);
  }
}

std::vector<Request> Proxy::take_requests(TimePoint now) {
  adds_.flush();
  barriers_.flush(now);
  reads_.flush();
  return std::exchange(out_.requests, {});
}

void Proxy::fail(const Error& why) {
  passthrough_.fail(why);
  adds_.fail(why);
  barriers_.fail(why);
  reads_.fail(why);
  out_.requests.clear();
}

size_t Proxy::pending() const {
  return passthrough_.pending() + adds_.pending() + barriers_.pending() + reads_.pending();
}

int parent_of(int node, int nodes, int fanout) {
  if (node <= 0 || node >= nodes) return -1;
  return fanout < 1 ? 0 : (node - 1) / fanout;
}

}  // namespace muster
