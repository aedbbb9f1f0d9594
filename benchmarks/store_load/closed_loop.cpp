// Closed loops: a connection sends its next operation when the one before is answered.

#include <fmt/format.h>

#include <cmath>

#include "cases.h"

namespace muster::load {
namespace {

using Steps = std::vector<Step>;

double seconds(Duration time) { return std::chrono::duration<double>(time).count(); }

std::string key_of(const Setting& setting, size_t number) {
  // As long as those of a real start-up: "default_pg/0//cpu//0/17" and the like.
  return fmt::format("{}/default_pg/0//cpu//{:08}", setting.prefix, number);
}

std::vector<std::string> keys_of(const Setting& setting) {
  std::vector<std::string> keys;
  for (size_t i = 0; i < setting.keys; ++i) keys.push_back(key_of(setting, i));
  return keys;
}

// An operation of each client, of one step or more.
Steps set_steps(const Setting& setting, size_t client) { return {set(key_of(setting, client), value_of(setting))}; }
Steps get_steps(const Setting& setting, size_t client) { return {get(key_of(setting, client), value_of(setting))}; }
Steps add_steps(const Setting& setting, size_t) { return {add(setting.prefix + "/counter", 1)}; }
// torch's clients wait for the keys before they ask for the values.
Steps multi_get_steps(const Setting& setting, size_t) {
  const auto keys = keys_of(setting);
  return {wait(keys), multi_get(keys, value_of(setting))};
}

struct Tally {
  std::vector<double> latencies;
  std::vector<double> so_far;  // by client: of the operation under way
  std::vector<size_t> at;      // by client: the step under way
};

Result<Figures> measure(const Setting& setting, Fleet& fleet, const std::vector<Steps>& steps) {
  const size_t clients = fleet.size();
  Tally tally{{}, std::vector<double>(clients), std::vector<size_t>(clients)};
  tally.latencies.reserve(1 << 20);
  const ServerProcess server(setting.pid);
  const double cpu = server.cpu_seconds();
  const Deadline deadline = setting.deadline;
  const TimePoint begin = steady_clock().now(), end = begin + setting.duration;
  TimePoint now = begin;
  const auto next = [&](size_t client) -> const Step* {
    const size_t at = tally.at[client];
    return at == 0 && now >= end ? nullptr : &steps[client % steps.size()][at];
  };
  const auto done = [&](size_t client, Duration taken) {
    now = steady_clock().now();
    tally.so_far[client] += seconds(taken);
    if (++tally.at[client] < steps[client % steps.size()].size()) return;
    tally.at[client] = 0;
    tally.latencies.push_back(std::exchange(tally.so_far[client], 0));
  };
  MUSTER_TRY(fleet.run(deadline, next, done));
  const double elapsed = seconds(steady_clock().now() - begin);
  const auto operations = static_cast<double>(tally.latencies.size());
  return Figures{{"operations", operations},
                 {"rate", operations / elapsed},
                 {"p50", quantile(tally.latencies, 0.5)},
                 {"p99", quantile(tally.latencies, 0.99)},
                 {"cpu", (server.cpu_seconds() - cpu) / operations}};
}

// The steps of every client, or of the one whose steps all share.
std::vector<Steps> steps_of(const Setting& setting, Steps (*make)(const Setting&, size_t), bool shared) {
  std::vector<Steps> steps;
  for (size_t client = 0; client < (shared ? 1 : setting.connections); ++client) steps.push_back(make(setting, client));
  return steps;
}

Result<Figures> measure_set(const Setting& setting) {
  MUSTER_ASSIGN(Fleet fleet, connect_all(setting));
  return measure(setting, fleet, steps_of(setting, set_steps, /*shared=*/false));
}

Result<Figures> measure_get(const Setting& setting) {
  MUSTER_ASSIGN(Fleet fleet, connect_all(setting));
  if (!setting.echo) {
    for (size_t client = 0; client < fleet.size(); ++client) {
      const Step step = set_steps(setting, client)[0];
      MUSTER_TRY(fleet.begin(client, step));
      MUSTER_TRY(fleet.drive(setting.deadline));
    }
  }
  return measure(setting, fleet, steps_of(setting, get_steps, /*shared=*/false));
}

Result<Figures> measure_add(const Setting& setting) {
  MUSTER_ASSIGN(Fleet fleet, connect_all(setting));
  MUSTER_ASSIGN(Figures figures, measure(setting, fleet, steps_of(setting, add_steps, /*shared=*/true)));
  if (setting.echo) return figures;
  // A fast wrong answer is worth nothing: no addition may be lost.
  const std::string sum = fmt::format("{:.0f}", figures["operations"].get<double>());
  const Step check = get(setting.prefix + "/counter", as_bytes(sum));
  MUSTER_TRY(fleet.begin(0, check));
  MUSTER_TRY(fleet.drive(setting.deadline));
  return figures;
}

Result<Figures> measure_multi_get(const Setting& setting) {
  MUSTER_ASSIGN(Fleet fleet, connect_all(setting));
  const Step fill = multi_set(keys_of(setting), value_of(setting));
  if (!setting.echo) {
    MUSTER_TRY(fleet.begin(0, fill));
    MUSTER_TRY(fleet.drive(setting.deadline));
  }
  return measure(setting, fleet, steps_of(setting, multi_get_steps, /*shared=*/true));
}

template <Steps (*make)(const Setting&, size_t)>
EchoPlan floor_of(const Setting& setting) {
  EchoPlan plan;
  for (const Step& step : make(setting, 0)) plan.turns.push_back({step.request.size(), step.reply_bytes});
  return plan;
}

}  // namespace

std::vector<Case> closed_loops() {
  return {{"set", "SET and a PING that confirms it, of a key of each client", measure_set, floor_of<set_steps>},
          {"get", "GET of a key of each client", measure_get, floor_of<get_steps>},
          {"add", "ADD to a counter of all", measure_add, floor_of<add_steps>},
          {"multi_get", "WAIT for and MULTI_GET of many keys", measure_multi_get, floor_of<multi_get_steps>}};
}

}  // namespace muster::load
