// muster-rpc-autograd-load: times a backward pass through one call of another process, in C++. Prints a line of JSON as
// muster-rpc-load does. Its floor is a tiny call for each of the two hops, through the same API, and a backward pass of
// the same graph in one process.
#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <CLI/CLI.hpp>

#include <cstdio>
#include <vector>

#include "child_process.h"
#include "floors.h"
#include "folder.h"
#include "muster/torch/rpc/worker.h"

namespace muster::bench {
namespace {

constexpr int kWarmUp = 20;

std::unique_ptr<rpc::Worker> join(const std::string& path, const std::string& name, const std::string& transports) {
  rpc::EndpointOptions options;
  options.name = name;
  options.transports = transports;
  options.interface = "127.0.0.1";
  return rpc::Worker::start(file_store(path).value(), options, [](rpc::Worker& worker) {
    worker.add_function("count", [](int64_t value) { return value; });
    worker.add_function("double", [](const at::Tensor& tensor) { return tensor.mul(2); });
  });
}

/// The median of what `timed` returns in `calls` calls, in microseconds.
template <class F>
double median_of(int calls, const F& timed) {
  std::vector<double> times;
  for (int i = 0; i < calls + kWarmUp; ++i) {
    const std::chrono::duration<double, std::micro> duration = timed();
    if (i >= kWarmUp) times.push_back(duration.count());
  }
  return median(std::move(times));
}

void run(const std::string& transports, int calls) {
  const Folder folder;
  const std::string store = folder.file("store");
  const ChildProcess server([&] {
    at::set_num_threads(1);
    const auto worker = join(store, "server", transports);
    for (;;) pause();
  });
  at::set_num_threads(1);
  const auto worker = join(store, "caller", transports);
  const double call = median_of(calls, [&] {
    const TimePoint begin = steady_clock().now();
    (void)worker->rpc_sync<int64_t>("server", "count", {}, int64_t{1});
    return steady_clock().now() - begin;
  });
  const at::Tensor value = at::ones({1}).set_requires_grad(true);
  const double backward = median_of(calls, [&] {
    const rpc::AutogradScope scope(*worker);
    const auto result = worker->rpc_sync<at::Tensor>("server", "double", {}, value);
    const TimePoint begin = steady_clock().now();
    scope.backward({result});
    return steady_clock().now() - begin;
  });
  const double local = median_of(calls, [&] {
    const auto result = value.mul(2);
    const TimePoint begin = steady_clock().now();
    result.backward();
    return steady_clock().now() - begin;
  });
  std::printf(R"({"case": "C++: backward, there and back", "unit": "us", "muster": %.6g, "floor": %.6g, )"
              R"("note": "floor: a tiny call for each of the two hops, and the same graph in one process"})"
              "\n",
              backward, 2 * call + local);
  (void)worker->agent().shutdown(Deadline::after(10s));
}

}  // namespace
}  // namespace muster::bench

int main(int argc, char** argv) {
  CLI::App app("Times a backward pass through one call of another process");
  std::string transports = "shm,tcp";
  bool quick = false;
  app.add_option("--transports", transports, "best first, of shm, unix and tcp");
  app.add_flag("--quick", quick, "fewer rounds");
  CLI11_PARSE(app, argc, argv);
  try {
    muster::bench::run(transports, quick ? 100 : 2000);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "muster-rpc-autograd-load: %s\n", error.what());
    return 1;
  }
}
