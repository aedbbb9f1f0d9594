#include "muster/cli/commands.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "muster/cli/choice_of_processes.h"
#include "muster/flight/report.h"
#include "muster/launch/failure.h"
#include "muster/launch/options/command_line.h"

namespace muster {
namespace {

/// The default for the text output. The JSON output has all operations by default.
constexpr size_t kShown = 10;
constexpr const char* kWhat = "muster group or RPC worker";

std::string label(const Recording& recording) {
  return fmt::format("rank {} (host {}, pid {})", recording.rank, recording.host, recording.pid);
}

/// One line for an operation that has begun `since` before it was read.
std::string line(Duration since, RecordState state, ErrorCode error, Duration lasted, const std::string& what) {
  std::string outcome = name(state);
  if (state == RecordState::kFailed) outcome += fmt::format(": {}", name(error));
  return fmt::format("  {:>10} ago  {:<8} {:>10}  {}\n", time_text(since), outcome, time_text(lasted), what);
}

/// One line for each of the last operations; the newest is the last.
std::string history(const Recording& recording, size_t last) {
  std::string text;
  const auto& records = recording.records;
  for (size_t i = records.size() - std::min(last, records.size()); i < records.size(); ++i) {
    const Record& record = records[i];
    const TimePoint begin = record.started ? *record.started : record.submitted.value_or(recording.taken);
    text += line(recording.taken - begin, record.state, record.error, record.ended.value_or(recording.taken) - begin,
                 record.with_site());
  }
  return text;
}

std::string history(const rpc::CallRecording& worker, size_t last) {
  std::string text;
  for (const rpc::CallRecord& call : worker.last_calls(last)) {
    const TimePoint begin = call.begun.value_or(worker.taken);
    text +=
        line(worker.taken - begin, call.state, call.error, call.ended.value_or(worker.taken) - begin, call.to_string());
  }
  return text;
}

std::string headline(const rpc::CallRecording& worker) {
  const auto count = [&](rpc::CallSide side) {
    return std::ranges::count_if(worker.calls,
                                 [&](const rpc::CallRecord& call) { return call.side == side && call.is_under_way(); });
  };
  return fmt::format("{}, RPC group \"{}\"{}: {} calls and {} functions under way\n", worker.who(), worker.group,
                     worker.stopped ? " [stopped]" : "", count(rpc::CallSide::kCaller), count(rpc::CallSide::kCallee));
}

std::string headline(const Recording& recording) {
  std::string text = fmt::format("{}, group \"{}\" of {} over {}", label(recording), recording.group, recording.size,
                                 recording.transport);
  if (recording.stopped) text += " [stopped]";
  const Record* last = recording.last_begun();
  if (last != nullptr && last->state == RecordState::kRunning) {
    text += fmt::format(": in {} for {}", last->with_site(),
                        time_text(recording.taken - last->started.value_or(recording.taken)));
  } else if (last != nullptr) {
    text += fmt::format(": in no call; the last, {}, ended {} ago", last->with_site(),
                        time_text(recording.taken - last->ended.value_or(recording.taken)));
  }
  return text + "\n";
}

/// Says which rank of a group is in which call, if they differ. `ranks` are the group's recordings on this host.
std::string difference(const std::vector<const Recording*>& ranks) {
  uint64_t latest = 0;
  for (const Recording* recording : ranks) {
    const Record* last = recording->last_begun();
    if (last != nullptr && last->state == RecordState::kRunning) latest = std::max(latest, last->call.sequence);
  }
  if (latest == 0) return "";
  std::vector<RankState> states;
  for (const Recording* recording : ranks) {
    if (recording->rank < 0 || recording->rank >= (1 << 20)) continue;
    states.resize(std::max<size_t>(states.size(), static_cast<size_t>(recording->rank) + 1));
    states[recording->rank] = rank_state_of(*recording, label(*recording), latest);
  }
  return compose_report(states, kNoRank).text;
}

void show(const FoundRecordings& chosen, const FoundRecordings& all, size_t last) {
  std::map<uint64_t, std::vector<const Recording*>> groups;
  for (const Recording& recording : all.groups) groups[recording.group_id].push_back(&recording);
  std::map<uint64_t, std::string> differences;
  for (const Recording& recording : chosen.groups) {
    std::fputs((headline(recording) + history(recording, last)).c_str(), stdout);
    const std::string text = difference(groups[recording.group_id]);
    if (!text.empty()) differences[recording.group_id] = fmt::format("group \"{}\": {}\n", recording.group, text);
  }
  for (const rpc::CallRecording& worker : chosen.workers) {
    std::fputs((headline(worker) + history(worker, last)).c_str(), stdout);
  }
  for (const auto& [id, text] : differences) std::fputs(text.c_str(), stdout);
  std::set<uint64_t> shown;
  for (const rpc::CallRecording& worker : chosen.workers) shown.insert(worker.group_id);
  std::vector<rpc::CallRecording> workers = all.workers;
  std::erase_if(workers, [&](const rpc::CallRecording& worker) { return !shown.contains(worker.group_id); });
  std::fputs(rpc::describe_waits(workers, kShown).c_str(), stdout);
}

/// A process that was chosen by its PID must have recordings.
Result<FoundRecordings> find_any(const ChoiceOfProcesses& choice) {
  for (const pid_t pid : choice.pids) {
    const ChoiceOfProcesses one{{pid}, {}};
    if (find_recordings(one).empty()) return fail(ErrorCode::kNotFound, why_none(one, kWhat));
  }
  FoundRecordings found = find_recordings(choice);
  if (found.empty()) return fail(ErrorCode::kNotFound, why_none(choice, kWhat));
  return found;
}

/// Python draws the picture. It inherits the trace as a file without a name.
int draw(const std::string& own_path, const std::string& trace, const std::string& picture) {
  const std::string path = fmt::format("/proc/self/fd/{}", memfd_create("muster-trace", 0));
  std::ofstream file(path);
  file << trace << std::flush;
  if (!file) return print_error("trace", "there is no memory for the trace", 1);
  return run_module("muster._trace_plot", own_path, {path, picture});
}

}  // namespace

int dump_command(const std::string&, const std::vector<std::string>& args) {
  ChoiceOfProcesses choice;
  bool as_json = false;
  size_t last = kShown;
  CLI::App app(
      "Shows the last operations of the groups and the last remote calls of running processes, and what they wait for. "
      "The processes may hang or be stopped.",
      "muster dump");
  choice.add_to(app);
  app.add_option("--last,-n", last, "number of operations of each group, and of calls of each RPC worker")
      ->check(number_between(0, 1e9, "a number from 0 up"))
      ->type_name("N")
      ->capture_default_str();
  app.add_flag("--json", as_json, "print one JSON array, with all operations unless --last is given");
  if (const auto end = parse_command_line(app, args)) return *end;
  const auto chosen = find_any(choice);
  if (!chosen) return print_error("dump", chosen.error().message, 1);
  if (as_json) {
    std::puts(rpc::to_json(chosen->groups, chosen->workers, app.count("--last") > 0 ? last : SIZE_MAX).c_str());
  } else {
    show(*chosen, find_recordings({}), last);
  }
  return 0;
}

int trace_command(const std::string& own_path, const std::vector<std::string>& args) {
  ChoiceOfProcesses choice;
  std::string path = "muster-trace.json";
  CLI::App app(
      "Writes the last operations and remote calls of running processes as a trace for https://ui.perfetto.dev or "
      "chrome://tracing, or as a picture of the last step of each rank that trains with "
      "muster.nn.DistributedDataParallel.",
      "muster trace");
  choice.add_to(app);
  app.add_option("-o,--output", path, "the file to write: the trace, or the picture if it ends in .png")
      ->type_name("FILE")
      ->capture_default_str();
  if (const auto end = parse_command_line(app, args)) return *end;
  const auto chosen = find_any(choice);
  if (!chosen) return print_error("trace", chosen.error().message, 1);
  if (std::filesystem::path(path).extension() == ".png") return draw(own_path, to_trace(chosen->groups), path);
  std::ofstream file(path, std::ios::trunc);
  file << rpc::to_trace(chosen->groups, chosen->workers) << std::flush;
  if (!file) return print_error("trace", "cannot write " + path, 1);
  const size_t count = chosen->groups.size() + chosen->workers.size();
  std::printf("%s: %zu recording%s\n", path.c_str(), count, count == 1 ? "" : "s");
  return 0;
}

}  // namespace muster
