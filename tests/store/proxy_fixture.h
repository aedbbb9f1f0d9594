#pragma once

#include <gtest/gtest.h>

#include "muster/store/proxy/proxy.h"
#include "muster/store/state/lease.h"
#include "store/expect.h"

namespace muster {

inline constexpr ClientId kProxy = 100, kOtherClient = 200;

// A proxy and a store that are connected by function calls.
class ProxyFixture {
 public:
  explicit ProxyFixture(Proxy::Options options = merging()) : proxy(options) { lease(kLeaseTime); }
  static Proxy::Options merging() {
    Proxy::Options options;
    options.merge = true;
    return options;
  }

  void lease(Duration time) { proxy.set_lease_end(now + time, now); }
  void ask(ClientId client, RequestId id, StoreOperation operation, std::vector<Key> keys, int64_t number = 0,
           std::vector<Bytes> values = {}) {
    proxy.submit({operation, id, std::move(keys), std::move(values), number}, client, now);
  }
  void get(ClientId client, RequestId id, Key key) { ask(client, id, StoreOperation::kGet, {std::move(key)}); }
  /// Takes the requests that go up now, and adds them to `in_flight`.
  std::vector<Request> up() {
    std::vector<Request> requests = proxy.take_requests(now);
    in_flight.insert(in_flight.end(), requests.begin(), requests.end());
    return requests;
  }
  /// Delivers requests and replies until none is on its way.
  void settle() {
    for (up(); !in_flight.empty(); up()) {
      for (Request& request : std::exchange(in_flight, {})) down(root.apply(std::move(request), kProxy));
    }
  }
  void down(Replies replies) {
    for (Reply& reply : replies) {
      if (reply.client == kProxy) proxy.receive(std::move(reply), now);
    }
  }
  /// Carries out a request of another node. Delivers replies for this node.
  Replies elsewhere(StoreOperation operation, std::vector<Key> keys, std::vector<Bytes> values = {},
                    int64_t number = 0) {
    Replies replies = root.apply({operation, ++last_id, std::move(keys), std::move(values), number}, kOtherClient);
    down(replies);
    return replies;
  }
  void set(const Key& key, const std::string& value) { elsewhere(StoreOperation::kSet, {key}, {to_bytes(value)}); }

  /// Each reply as "client:id=number or text or error", in order.
  std::vector<std::string> replies() {
    std::vector<std::string> result;
    for (const Reply& reply : proxy.take_replies()) {
      std::string text = std::to_string(reply.client) + ":" + std::to_string(reply.id) + "=";
      if (!reply.status) text += name(reply.status.error().code);
      if (reply.status && reply.values.empty()) text += std::to_string(reply.number);
      for (const Bytes& value : reply.values) text += to_string(value) + ";";
      result.push_back(text);
    }
    return result;
  }

  TimePoint now{1'000'000'000};
  Proxy proxy;
  StoreState root;
  std::vector<Request> in_flight;
  RequestId last_id = 0;
};
using Texts = std::vector<std::string>;

}  // namespace muster
