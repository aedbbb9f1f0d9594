#include "muster/cli/choice_of_processes.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

namespace muster {
namespace {

/// Why a process has no recordings.
std::string reason(pid_t pid, const std::string& what) {
  std::error_code error;
  const std::filesystem::directory_iterator open(fmt::format("/proc/{}/fd", pid), error);
  if (!error) return fmt::format("process {} has no {} (or its MUSTER_RECORDER is 0)", pid, what);
  if (error == std::errc::no_such_file_or_directory) return fmt::format("there is no process {}", pid);
  return fmt::format("cannot look into process {}: {}", pid, error.message());
}

template <class T>
void append(std::vector<T>& found, std::vector<T> more, const ChoiceOfProcesses& choice) {
  for (T& one : more)
    if (choice.has(one)) found.push_back(std::move(one));
}

}  // namespace

void ChoiceOfProcesses::add_to(CLI::App& app) {
  app.add_option("PID", pids, "the processes; by default all processes of this user on this host")->type_name("");
  app.add_option("--job,-j", run_id, "all processes of the job with this --rdzv-id on this host")->type_name("NAME");
}

FoundRecordings find_recordings(const ChoiceOfProcesses& choice) {
  FoundRecordings found;
  for (const pid_t pid : choice.among(processes_with_recordings())) append(found.groups, recordings_of(pid), choice);
  for (const pid_t pid : choice.among(rpc::processes_with_call_logs()))
    append(found.workers, rpc::call_logs_of(pid), choice);
  return found;
}

std::string why_none(const ChoiceOfProcesses& choice, const std::string& what) {
  if (!choice.pids.empty()) return reason(choice.pids.front(), what);
  const std::string of_job =
      choice.run_id.empty() ? "" : " in the job " + choice.run_id + " (`muster status` lists the jobs)";
  return fmt::format("no process of this user on this host has a {}{}", what, of_job);
}

std::string time_text(Duration duration) {
  const double seconds = std::chrono::duration<double>(duration).count();
  if (seconds >= 1) return fmt::format("{:.1f} s", seconds);
  return seconds >= 1e-3 ? fmt::format("{:.1f} ms", seconds * 1e3) : fmt::format("{:.1f} us", seconds * 1e6);
}

}  // namespace muster
