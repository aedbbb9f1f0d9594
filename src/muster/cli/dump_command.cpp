#include "muster/cli/commands.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>

#include "muster/flight/recorder_reader.h"
#include "muster/flight/report.h"
#include "muster/launch/failure.h"
#include "muster/launch/options/command_line.h"

namespace muster {
namespace {

using Recordings = std::vector<Recording>;

/// The default for the text output. The JSON output has all operations by default.
constexpr size_t kShown = 10;

std::string time_text(Duration duration) {
  const double seconds = std::chrono::duration<double>(duration).count();
  if (seconds >= 1) return fmt::format("{:.1f} s", seconds);
  return seconds >= 1e-3 ? fmt::format("{:.1f} ms", seconds * 1e3) : fmt::format("{:.1f} us", seconds * 1e6);
}

std::string label(const Recording& recording) {
  return fmt::format("rank {} (host {}, pid {})", recording.rank, recording.host, recording.pid);
}

/// One line for each of the last operations; the newest is the last.
std::string history(const Recording& recording, size_t last) {
  std::string text;
  const auto& records = recording.records;
  for (size_t i = records.size() - std::min(last, records.size()); i < records.size(); ++i) {
    const Record& record = records[i];
    const TimePoint begin = record.started ? *record.started : record.submitted.value_or(recording.taken);
    const Duration lasted = record.ended.value_or(recording.taken) - begin;
    std::string state = name(record.state);
    if (record.state == RecordState::kFailed) state += fmt::format(": {}", name(record.error));
    text += fmt::format("  {:>10} ago  {:<8} {:>10}  {}\n", time_text(recording.taken - begin), state,
                        time_text(lasted), record.with_site());
  }
  return text;
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

void show(const Recordings& chosen, const Recordings& all, size_t last) {
  std::map<uint64_t, std::vector<const Recording*>> groups;
  for (const Recording& recording : all) groups[recording.group_id].push_back(&recording);
  std::map<uint64_t, std::string> differences;
  for (const Recording& recording : chosen) {
    std::fputs((headline(recording) + history(recording, last)).c_str(), stdout);
    const std::string text = difference(groups[recording.group_id]);
    if (!text.empty()) differences[recording.group_id] = fmt::format("group \"{}\": {}\n", recording.group, text);
  }
  for (const auto& [id, text] : differences) std::fputs(text.c_str(), stdout);
}

/// The processes that the user chooses: by PID, by job, or all.
struct Choice {
  std::vector<pid_t> pids;
  std::string run_id;

  void add_to(CLI::App& app) {
    app.add_option("PID", pids, "the processes; by default all processes of this user on this host that have groups")
        ->type_name("");
    app.add_option("--job,-j", run_id, "all ranks of the job with this --rdzv-id on this host")->type_name("NAME");
  }
};

/// Why a process has no recordings.
std::string reason(pid_t pid) {
  std::error_code error;
  const std::filesystem::directory_iterator open(fmt::format("/proc/{}/fd", pid), error);
  if (!error) return fmt::format("process {} has no muster group (or its MUSTER_RECORDER is 0)", pid);
  if (error == std::errc::no_such_file_or_directory) return fmt::format("there is no process {}", pid);
  return fmt::format("cannot look into process {}: {}", pid, error.message());
}

/// kNotFound if there are none, or if a process that was chosen by its PID has none.
Result<Recordings> find_recordings(const Choice& choice) {
  Recordings found;
  for (const pid_t pid : choice.pids.empty() ? processes_with_recordings() : choice.pids) {
    Recordings of_one = recordings_of(pid);
    if (of_one.empty() && !choice.pids.empty()) return fail(ErrorCode::kNotFound, reason(pid));
    for (Recording& recording : of_one)
      if (!choice.pids.empty() || choice.run_id.empty() || recording.of_job(choice.run_id))
        found.push_back(std::move(recording));
  }
  if (!found.empty()) return found;
  const std::string of_job =
      choice.run_id.empty() ? "" : " in the job " + choice.run_id + " (`muster status` lists the jobs)";
  return fail(ErrorCode::kNotFound, "no process of this user on this host has a muster group" + of_job);
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
  Choice choice;
  bool as_json = false;
  size_t last = kShown;
  CLI::App app(
      "Shows the last operations of the groups of running ranks, and what they wait for. Ranks may hang or be stopped.",
      "muster dump");
  choice.add_to(app);
  app.add_option("--last,-n", last, "number of operations of each group")
      ->check(number_between(0, 1e9, "a number from 0 up"))
      ->type_name("N")
      ->capture_default_str();
  app.add_flag("--json", as_json, "print one JSON array, with all operations unless --last is given");
  if (const auto end = parse_command_line(app, args)) return *end;
  const auto chosen = find_recordings(choice);
  if (!chosen) return print_error("dump", chosen.error().message, 1);
  if (as_json) {
    std::puts(to_json(*chosen, app.count("--last") > 0 ? last : SIZE_MAX).c_str());
  } else {
    show(*chosen, find_recordings(Choice()).value_or(Recordings()), last);
  }
  return 0;
}

int trace_command(const std::string& own_path, const std::vector<std::string>& args) {
  Choice choice;
  std::string path = "muster-trace.json";
  CLI::App app(
      "Writes the last operations of running ranks as a trace for https://ui.perfetto.dev or chrome://tracing, or as a "
      "picture of the last step of each rank that trains with muster.nn.DistributedDataParallel.",
      "muster trace");
  choice.add_to(app);
  app.add_option("-o,--output", path, "the file to write: the trace, or the picture if it ends in .png")
      ->type_name("FILE")
      ->capture_default_str();
  if (const auto end = parse_command_line(app, args)) return *end;
  const auto chosen = find_recordings(choice);
  if (!chosen) return print_error("trace", chosen.error().message, 1);
  if (std::filesystem::path(path).extension() == ".png") return draw(own_path, to_trace(*chosen), path);
  std::ofstream file(path, std::ios::trunc);
  file << to_trace(*chosen) << std::flush;
  if (!file) return print_error("trace", "cannot write " + path, 1);
  std::printf("%s: %zu recording%s\n", path.c_str(), chosen->size(), chosen->size() == 1 ? "" : "s");
  return 0;
}

}  // namespace muster
