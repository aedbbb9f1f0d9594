#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "muster/rpc/endpoint.h"

namespace muster::rpc::test {

inline constexpr Duration kPatience = std::chrono::seconds(60);

/// `transports`: as in EndpointOptions, or "striped" for TCP links of three connections.
inline EndpointOptions options_for(const std::string& name, const std::string& transports) {
  EndpointOptions options;
  options.name = name;
  options.transports = transports == "striped" ? "tcp" : transports;
  options.tcp_streams = transports == "striped" ? 3 : 1;
  options.interface = "127.0.0.1";
  return options;
}

inline std::shared_ptr<Agent> start(const std::shared_ptr<Store>& store, const EndpointOptions& options) {
  auto agent = start_endpoint(store, options);
  if (!agent) {
    ADD_FAILURE() << agent.error().to_string();
    std::abort();
  }
  return *agent;
}

inline Message text(const std::string& words) { return Message{to_bytes(words), {}}; }
inline std::string text(const Message& message) { return muster::to_string(ByteView(message.head)); }

/// A function that returns its arguments.
inline void echo(Request request, Responder responder) { responder.reply(std::move(request.arguments)); }

/// The result of a call, which must succeed.
inline Message result_of(const Future& future) {
  const CallResult& result = future.wait();
  EXPECT_TRUE(result) << result.error().to_string();
  return result ? *result : Message();
}
/// The error of a call, which must fail.
inline CallError error_of(const Future& future) {
  const CallResult& result = future.wait();
  EXPECT_FALSE(result);
  return result ? CallError() : result.error();
}

}  // namespace muster::rpc::test
