// What connections themselves cost.

#include "cases.h"

namespace muster::load {
namespace {

Result<Figures> measure_connect(const Setting& setting) {
  const ServerProcess server(setting.pid);
  MUSTER_ASSIGN(Fleet fleet, Fleet::create(!setting.echo));
  const double cpu = server.cpu_seconds();
  const auto count = static_cast<double>(setting.connections);
  std::vector<double> latencies;
  const TimePoint begin = steady_clock().now();
  MUSTER_TRY(fleet.connect(setting.server, setting.connections, setting.deadline, [&](size_t, Duration taken) {
    latencies.push_back(std::chrono::duration<double>(taken).count());
  }));
  const double elapsed = seconds_since(begin), spent = server.cpu_seconds() - cpu;
  fleet.reset();
  return Figures{{"rate", count / elapsed},
                 {"cpu", spent / count},
                 {"p50", quantile(latencies, 0.5)},
                 {"p99", quantile(latencies, 0.99)}};
}

Result<Figures> measure_idle(const Setting& setting) {
  const ServerProcess server(setting.pid);
  {
    MUSTER_ASSIGN(Fleet first, Fleet::create(!setting.echo));  // what the first connection of all costs
    MUSTER_TRY(first.connect(setting.server, 1, setting.deadline));
  }
  const size_t before = server.resident_bytes();
  MUSTER_ASSIGN(Fleet fleet, connect_all(setting));
  const double after = static_cast<double>(server.resident_bytes());
  return Figures{{"memory", (after - static_cast<double>(before)) / static_cast<double>(setting.connections)}};
}

EchoPlan greeting_alone(const Setting&) { return {.turns = {{1, 1}}}; }

}  // namespace

std::vector<Case> arrivals() {
  return {{"connect", "connect, VALIDATE and PING", measure_connect, greeting_alone},
          {"idle", "the server's memory for a connection that does nothing", measure_idle, greeting_alone}};
}

}  // namespace muster::load
