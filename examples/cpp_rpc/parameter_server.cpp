// Fits a line to noisy points by asynchronous SGD: rank 0 holds the parameters, the other ranks pull them and push
// gradients, each at its own pace. Uses muster::core, without libtorch.
//
//   muster run --nproc-per-node 4 --no-python ./parameter_server

#include <muster/base/run_main.h>
#include <muster/rpc/endpoint.h>
#include <muster/store/job_store.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <random>

namespace rpc = muster::rpc;
using std::chrono_literals::operator""s;
using Parameters = std::array<double, 2>;  // slope and intercept

rpc::Message message_of(const Parameters& values) {
  rpc::Message message;
  message.head.resize(sizeof values);
  std::memcpy(message.head.data(), values.data(), sizeof values);
  return message;
}

Parameters parameters_of(const rpc::Message& message) {
  Parameters values{};
  if (message.head.size() == sizeof values) std::memcpy(values.data(), message.head.data(), sizeof values);
  return values;
}

/// The parameters, and the functions by which workers reach them. Calls run on several threads at a time.
class Server {
 public:
  muster::Result<> serve(rpc::Agent& agent) {
    const auto pull = [this](rpc::Request, rpc::Responder responder) {
      const std::lock_guard lock(mutex_);
      responder.reply(message_of(values_));
    };
    const auto push = [this](rpc::Request request, rpc::Responder responder) {
      const Parameters gradient = parameters_of(request.arguments);
      const std::lock_guard lock(mutex_);
      for (size_t i = 0; i < values_.size(); ++i) values_[i] -= 0.05 * gradient[i];
      responder.reply({});
    };
    MUSTER_TRY(agent.add_function("pull", pull, {}));
    return agent.add_function("push", push, {});
  }
  Parameters values() const {
    const std::lock_guard lock(mutex_);
    return values_;
  }

 private:
  mutable std::mutex mutex_;
  Parameters values_{};
};

/// The gradient of the squared error over one batch of points of the line y = 3 x - 1.
Parameters gradient_at(const Parameters& values, std::mt19937& random) {
  constexpr int kBatch = 32;
  std::uniform_real_distribution<double> position(-1, 1);
  std::normal_distribution<double> noise(0, 0.01);
  Parameters gradient{};
  for (int i = 0; i < kBatch; ++i) {
    const double x = position(random), y = 3 * x - 1 + noise(random);
    const double error = values[0] * x + values[1] - y;
    gradient[0] += 2 * error * x / kBatch;
    gradient[1] += 2 * error / kBatch;
  }
  return gradient;
}

muster::Result<> train(rpc::Agent& agent, int rank) {
  std::mt19937 random(static_cast<unsigned>(rank));
  for (int step = 0; step < 500; ++step) {
    const rpc::CallResult pulled = agent.call("server", "pull", {}, {.timeout = 10s}).wait();
    if (!pulled) return tl::unexpected(pulled.error().error);
    const Parameters gradient = gradient_at(parameters_of(*pulled), random);
    const rpc::CallResult pushed = agent.call("server", "push", message_of(gradient), {.timeout = 10s}).wait();
    if (!pushed) return tl::unexpected(pushed.error().error);
  }
  return {};
}

muster::Result<> run() {
  MUSTER_ASSIGN(const int rank, muster::job_number("RANK"));
  MUSTER_ASSIGN(const int size, muster::job_number("WORLD_SIZE"));
  const muster::Deadline deadline = muster::Deadline::after(60s);
  Server server;
  rpc::EndpointOptions options;
  options.name = rank == 0 ? "server" : "";  // others: "worker1", "worker2", ...
  if (rank == 0) options.setup = [&server](rpc::Agent& agent) { return server.serve(agent); };
  MUSTER_ASSIGN(const auto agent, rpc::join_job(options));
  if (rank != 0) MUSTER_TRY(train(*agent, rank));
  MUSTER_TRY(agent->barrier("trained", size, deadline));
  if (rank == 0) std::printf("slope %.1f, intercept %.1f\n", server.values()[0], server.values()[1]);
  return agent->shutdown(deadline);
}

int main() { return muster::run_main(run); }
