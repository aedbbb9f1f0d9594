#include <fmt/format.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <vector>

#include "caller.h"
#include "muster/rpc/endpoint.h"

namespace muster::bench {
namespace {

using rpc::Agent;
using rpc::Buffer;
using rpc::Future;
using rpc::Message;

/// Longer messages go into a segment, which is not copied into the request.
constexpr size_t kMaxHead = 1024;

std::shared_ptr<Agent> join(const std::string& path, const std::string& name, const std::string& transports) {
  rpc::EndpointOptions options;
  options.name = name;
  options.transports = transports;
  options.interface = "127.0.0.1";
  auto store = file_store(path);
  if (!store) fail_benchmark(store.error().to_string());
  auto agent = rpc::start_endpoint(std::move(*store), options);
  if (!agent) fail_benchmark(agent.error().to_string());
  return *agent;
}

class MusterCaller final : public Caller {
 public:
  explicit MusterCaller(std::shared_ptr<Agent> agent) : agent_(std::move(agent)) {}
  ~MusterCaller() override { (void)agent_->shutdown(Deadline::after(10s)); }

  void prepare(size_t bytes, int count) override {
    messages_.assign(count, {});
    for (Message& message : messages_) {
      if (bytes <= kMaxHead) {
        message.head.assign(bytes, 1);
      } else {
        message.segments.push_back(Buffer::allocate(bytes));
        std::memset(message.segments.back().data(), 1, bytes);
      }
    }
  }

  void echo(int index) override { check(begin(index, {.waits = true})); }

  void echo_many(size_t in_flight, int calls, std::vector<double>* times) override {
    std::deque<std::pair<Future, TimePoint>> begun;
    const auto finish_one = [&] {
      check(begun.front().first);
      if (times != nullptr) times->push_back(microseconds_since(begun.front().second));
      begun.pop_front();
    };
    for (int i = 0; i < calls; ++i) {
      if (begun.size() == in_flight) finish_one();
      const TimePoint now = times != nullptr ? steady_clock().now() : TimePoint();
      begun.emplace_back(begin(0, {}), now);
    }
    while (!begun.empty()) finish_one();
  }

 private:
  Future begin(int index, const rpc::CallOptions& options) {
    return agent_->call("worker", "echo", messages_[index % messages_.size()], options);
  }
  static void check(const Future& future) {
    if (const auto& result = future.wait(); !result) fail_benchmark(result.error().to_string());
  }

  const std::shared_ptr<Agent> agent_;
  std::vector<Message> messages_;
};

}  // namespace

void serve_muster(const std::string& path, const std::string& transports) {
  const auto agent = join(path, "worker", transports);
  (void)agent->add_function(
      "echo", [](rpc::Request request, rpc::Responder responder) { responder.reply(std::move(request.arguments)); },
      {});
  for (;;) pause();
}

std::unique_ptr<Caller> connect_muster(const std::string& path, const std::string& transports) {
  return std::make_unique<MusterCaller>(join(path, "caller", transports));
}

}  // namespace muster::bench
