#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "muster/store/server/server.h"

namespace muster {

inline Bytes test_secret() { return to_bytes("the secret of this test's job"); }
inline Deadline test_deadline() { return Deadline::after(60s); }

/// A server on a free loopback port, an abstract Unix socket and a port for torch's protocol.
struct TestServer {
  explicit TestServer(const std::string& upstream = "", StoreServerOptions options = {}) {
    static int serial = 0;
    const std::string name = "muster-store-test-" + std::to_string(getpid()) + "-" + std::to_string(serial++);
    options.credentials.secret = test_secret();
    options.muster_listen = {*Address::parse("127.0.0.1:0"), Address::unix_abstract(name)};
    options.torch_listen = {*Address::parse("127.0.0.1:0")};
    options.upstream = upstream;
    auto started = StoreServer::start(std::move(options), test_deadline());
    if (!started) ADD_FAILURE() << started.error().to_string();
    if (started) server = std::move(*started);
  }

  std::string tcp_url() const { return "tcp://" + server->muster_addresses()[0].to_string(); }
  std::string unix_url() const { return server->muster_addresses()[1].to_string(); }
  Address torch_address() const { return server->torch_addresses()[0]; }

  std::unique_ptr<StoreServer> server;
};

inline std::unique_ptr<Store> open_or_fail(const std::string& url) {
  auto store = open_store(url, test_secret(), test_deadline());
  if (store) return std::move(*store);
  ADD_FAILURE() << store.error().to_string();
  return nullptr;
}

}  // namespace muster
