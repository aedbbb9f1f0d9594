#include "many_endpoints.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <vector>

#include "caller.h"
#include "child_process.h"
#include "muster/base/clock.h"
#include "muster/rpc/endpoint.h"
#include "muster/store/server/server.h"

namespace muster::bench {
namespace {

constexpr Duration kTimeout = 60s;

template <class T>
T value_or_fail(Result<T> result) {
  if (!result) fail_benchmark(result.error().to_string());
  return std::move(*result);
}

double milliseconds(TimePoint begin) {
  return std::chrono::duration<double, std::milli>(steady_clock().now() - begin).count();
}

int open_descriptors() {
  const auto entries = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<int>(std::distance(begin(entries), end(entries))) - 1;  // without its own
}

/// Two pipes between this process and its children: through one they report numbers, the other one tells them to go on.
class Gate {
 public:
  Gate() {
    if (pipe(reports_) != 0 || pipe(open_) != 0) fail_benchmark("cannot make a pipe");
  }
  ~Gate() {
    for (const int fd : {reports_[0], reports_[1], open_[0], open_[1]}) close(fd);
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  /// In a child: reports, and waits until the parent opens the gate.
  void wait(int report) {
    open();  // else this process would hold it shut
    send(report);
    char none;
    if (read(open_[0], &none, 1) != 0) fail_benchmark("cannot read from a pipe");
  }
  void send(int report) {
    if (write(reports_[1], &report, sizeof(report)) != sizeof(report)) fail_benchmark("cannot write to a pipe");
  }
  /// In the parent: waits for `count` reports, and returns the largest.
  int collect(int count) {
    int largest = 0;
    for (int i = 0; i < count; ++i) {
      int report;
      if (read(reports_[0], &report, sizeof(report)) != sizeof(report)) fail_benchmark("cannot read from a pipe");
      largest = std::max(largest, report);
    }
    return largest;
  }
  /// It is open once all processes have opened it.
  void open() {
    close(open_[1]);
    open_[1] = -1;
  }

 private:
  int reports_[2], open_[2];
};

[[noreturn]] void serve_store(const std::string& socket, Gate& gate) {
  StoreServerOptions options;
  options.muster_listen = {value_or_fail(Address::parse("unix:" + socket))};
  const auto server = value_or_fail(StoreServer::start(options, Deadline::after(kTimeout)));
  gate.open();  // else this process would hold it shut
  gate.send(0);
  for (;;) pause();
}

std::shared_ptr<Store> connect_to(const std::string& socket) {
  return value_or_fail(open_store("unix:" + socket, {}, Deadline::after(kTimeout)));
}

std::string name_of(int index) { return fmt::format("worker{}", index); }

[[noreturn]] void run_endpoint(const std::string& socket, rpc::EndpointOptions options, Gate& gate, int index,
                               int count) {
  options.name = name_of(index);
  options.interface = "127.0.0.1";
  options.setup = [](rpc::Agent& agent) {
    return agent.add_function(
        "echo", [](rpc::Request request, rpc::Responder responder) { responder.reply(std::move(request.arguments)); },
        {});
  };
  const auto agent = value_or_fail(rpc::start_endpoint(connect_to(socket), options));
  gate.wait(open_descriptors());
  std::vector<rpc::Future> calls;
  for (int i = 1; i < count; ++i) {  // each begins with another one
    calls.push_back(agent->call(name_of((index + i) % count), "echo", rpc::Message{}, {.timeout = kTimeout}));
  }
  for (const rpc::Future& call : calls) {
    if (const auto& result = call.wait(); !result) fail_benchmark(result.error().to_string());
  }
  gate.send(0);
  for (;;) pause();
}

[[noreturn]] void only_connect(const std::string& socket, Gate& gate) {
  const auto store = connect_to(socket);
  gate.send(0);
  for (;;) pause();
}

}  // namespace

ManyEndpoints start_many_endpoints(const std::string& socket, const std::string& transports, int count) {
  rpc::EndpointOptions options;
  options.transports = transports;
  Gate gate;
  const ChildProcess store([&] { serve_store(socket, gate); });
  gate.collect(1);
  ManyEndpoints figures;
  const auto start_all = [&](const std::function<void(int)>& run) {
    std::vector<std::unique_ptr<ChildProcess>> processes;
    for (int i = 0; i < count; ++i) processes.push_back(std::make_unique<ChildProcess>([&, i] { run(i); }));
    return processes;
  };
  {
    const TimePoint begin = steady_clock().now();
    const auto processes = start_all([&](int) { only_connect(socket, gate); });
    gate.collect(count);
    figures.floor = milliseconds(begin);
  }
  const TimePoint begin = steady_clock().now();
  const auto processes = start_all([&](int index) { run_endpoint(socket, options, gate, index, count); });
  figures.descriptors = gate.collect(count);
  figures.started = milliseconds(begin);
  const TimePoint joined = steady_clock().now();
  gate.open();
  gate.collect(count);
  figures.all_pairs = milliseconds(joined);
  return figures;
}

}  // namespace muster::bench
