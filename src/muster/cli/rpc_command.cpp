#include "muster/cli/commands.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <thread>
#include <tuple>

#include "muster/cli/choice_of_processes.h"
#include "muster/launch/failure.h"
#include "muster/launch/options/command_line.h"

namespace muster {
namespace {

using rpc::CallRecording;
using rpc::CallSide;
using rpc::FunctionRecord;
using Workers = std::vector<CallRecording>;

/// Of the heading and of the rows.
constexpr char kColumns[] = "  {:<5} {:<32} {:<16} {:>9} {:>9} {:>8} {:>10} {:>10} {:>9} {:>9}\n";

struct TopOptions {
  ChoiceOfProcesses choice;
  double interval = 1;
  int64_t count = 0;
  size_t rows = 10;
  bool json = false;
};

/// The calls of one function with one peer in an interval.
struct Row {
  FunctionRecord function;
  double seconds = 0;  ///< the length of the interval
  uint64_t ended = 0, failed = 0, bytes_in = 0, bytes_out = 0;
  rpc::Latencies latencies;

  bool is_active() const { return ended > 0 || function.under_way() > 0; }
  double rate(uint64_t count) const { return static_cast<double>(count) / seconds; }
};

const CallRecording* find(const Workers& workers, const CallRecording& like) {
  const auto found = std::ranges::find_if(workers, [&](const CallRecording& other) {
    return std::tie(other.pid, other.group_id, other.worker.id) == std::tie(like.pid, like.group_id, like.worker.id);
  });
  return found == workers.end() ? nullptr : &*found;
}

/// The rows of a worker since an earlier reading, those with most calls first. A worker without an earlier reading has
/// started since.
std::vector<Row> rows_of(const CallRecording& now, const CallRecording* before, Duration interval) {
  std::vector<Row> rows;
  for (size_t i = 0; i < now.functions.size(); ++i) {
    // A worker only appends functions, so they keep their places. Their names may be cut off.
    static const FunctionRecord kNone;
    const FunctionRecord& function = now.functions[i];
    const FunctionRecord& earlier = before == nullptr || i >= before->functions.size() ? kNone : before->functions[i];
    const Duration length = before == nullptr ? interval : now.taken - before->taken;
    const bool calls = function.side == CallSide::kCaller;
    const uint64_t requests = function.request_bytes - earlier.request_bytes;
    const uint64_t replies = function.reply_bytes - earlier.reply_bytes;
    rows.push_back({function, std::max(std::chrono::duration<double>(length).count(), 1e-6),
                    function.ended - earlier.ended, function.failed - earlier.failed, calls ? replies : requests,
                    calls ? requests : replies, function.latencies.since(earlier.latencies)});
  }
  std::ranges::stable_sort(rows, [](const Row& a, const Row& b) {
    return std::tuple(a.ended, a.function.under_way()) > std::tuple(b.ended, b.function.under_way());
  });
  return rows;
}

std::string rate_text(double rate) {
  return rate >= 100 || rate == 0 ? fmt::format("{:.0f}", rate) : fmt::format("{:.1f}", rate);
}

std::string row_text(const Row& row) {
  const auto latency = [&](double part) {
    const auto value = row.latencies.percentile(part);
    return value ? time_text(*value) : std::string("-");
  };
  return fmt::format(kColumns, row.function.side == CallSide::kCaller ? "call" : "serve", row.function.function,
                     row.function.peer, row.function.under_way(), rate_text(row.rate(row.ended)),
                     rate_text(row.rate(row.failed)), latency(0.5), latency(0.99),
                     fmt::format("{:.1f}", row.rate(row.bytes_in) / 1e6),
                     fmt::format("{:.1f}", row.rate(row.bytes_out) / 1e6));
}

std::string text_of(const Workers& now, const Workers& before, Duration interval, size_t most) {
  std::string text = fmt::format("{} RPC workers of this user on this host\n", now.size());
  for (const CallRecording& worker : now) {
    std::vector<Row> rows = rows_of(worker, find(before, worker), interval);
    std::erase_if(rows, [](const Row& row) { return !row.is_active(); });
    text += fmt::format("{}, group \"{}\"{}{}\n", worker.who(), worker.group, worker.stopped ? " [stopped]" : "",
                        rows.empty() ? ": no calls" : "");
    if (rows.empty()) continue;
    text += fmt::format(kColumns, "side", "function", "peer", "in flight", "calls/s", "failed/s", "p50", "p99",
                        "MB/s in", "MB/s out");
    for (size_t i = 0; i < std::min(most, rows.size()); ++i) text += row_text(rows[i]);
    if (rows.size() > most) text += fmt::format("  and {} more (--rows)\n", rows.size() - most);
  }
  return text;
}

std::string json_of(const Workers& now, const Workers& before, Duration interval) {
  auto all = nlohmann::json::array();
  for (const CallRecording& worker : now) {
    auto functions = nlohmann::json::array();
    for (const Row& row : rows_of(worker, find(before, worker), interval)) {
      auto& value = functions.emplace_back();
      value = {{"side", row.function.side == CallSide::kCaller ? "call" : "serve"},
               {"function", row.function.function},
               {"peer", row.function.peer},
               {"in_flight", row.function.under_way()},
               {"calls_per_second", row.rate(row.ended)},
               {"failed_per_second", row.rate(row.failed)},
               {"bytes_in_per_second", row.rate(row.bytes_in)},
               {"bytes_out_per_second", row.rate(row.bytes_out)}};
      for (const auto& [key, part] : {std::pair("p50_us", 0.5), std::pair("p90_us", 0.9), std::pair("p99_us", 0.99)}) {
        const auto latency = row.latencies.percentile(part);
        if (latency) value[key] = std::chrono::duration<double, std::micro>(*latency).count();
      }
    }
    all.push_back({{"worker", worker.worker.name},
                   {"id", worker.worker.id},
                   {"group", worker.group},
                   {"host", worker.host},
                   {"pid", worker.pid},
                   {"stopped", worker.stopped},
                   {"functions", std::move(functions)}});
  }
  return all.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

int top(const TopOptions& options) {
  const auto interval = Duration(static_cast<int64_t>(options.interval * 1e9));
  Workers before = find_recordings(options.choice).workers;
  if (before.empty()) return print_error("rpc top", why_none(options.choice, "worker of muster.rpc"), 1);
  const bool clears = !options.json && ::isatty(STDOUT_FILENO) == 1;
  for (int64_t shown = 0; options.count == 0 || shown < options.count; ++shown) {
    std::this_thread::sleep_for(interval);  // tidy: allow(sleep) the rates are those of an interval
    Workers now = find_recordings(options.choice).workers;
    const std::string text =
        options.json ? json_of(now, before, interval) : text_of(now, before, interval, options.rows);
    if (clears) std::fputs("\x1b[H\x1b[2J", stdout);
    std::fputs(text.c_str(), stdout);
    if (std::fflush(stdout) != 0) return 1;
    if (now.empty()) return 0;
    before = std::move(now);
  }
  return 0;
}

}  // namespace

int rpc_command(const std::string&, const std::vector<std::string>& args) {
  TopOptions options;
  CLI::App app("Looks at remote calls (muster.rpc).", "muster rpc");
  app.require_subcommand(1);
  CLI::App* const listing = app.add_subcommand(
      "top",
      "Shows the remote calls of running workers, by function and peer: those in flight, and of each interval the "
      "calls per second, their latencies and bytes. The processes may hang or be stopped.");
  options.choice.add_to(*listing);
  listing->add_option("--interval,-i", options.interval, "seconds between two listings")
      ->check(number_between(0.01, 1e6, "a number of seconds from 0.01 up"))
      ->type_name("S")
      ->capture_default_str();
  listing->add_option("--count,-n", options.count, "number of listings; 0: until interrupted or no worker is left")
      ->check(number_between(0, 1e9, "a number from 0 up"))
      ->type_name("N")
      ->capture_default_str();
  listing->add_option("--rows", options.rows, "the most functions of each worker")
      ->check(number_between(1, 1e9, "a number from 1 up"))
      ->type_name("N")
      ->capture_default_str();
  listing->add_flag("--json", options.json, "print one JSON array per line, with all functions");
  if (const auto end = parse_command_line(app, args)) return *end;
  return top(options);
}

}  // namespace muster
