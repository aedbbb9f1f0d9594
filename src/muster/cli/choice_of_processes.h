#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "muster/flight/recorder_reader.h"
#include "muster/rpc/log/call_log_reader.h"

namespace muster {

/// The processes that the user chooses: by PID, by job, or all of this user on this host.
struct ChoiceOfProcesses {
  std::vector<pid_t> pids;
  std::string run_id;

  /// Adds the options that choose.
  void add_to(CLI::App& app);
  /// The chosen ones of those in `all`.
  std::vector<pid_t> among(std::vector<pid_t> all) const { return pids.empty() ? std::move(all) : pids; }
  bool has(const ProcessState& process) const { return !pids.empty() || run_id.empty() || process.of_job(run_id); }
};

/// What the processes have recorded.
struct FoundRecordings {
  std::vector<Recording> groups;
  std::vector<rpc::CallRecording> workers;
  bool empty() const { return groups.empty() && workers.empty(); }
};
FoundRecordings find_recordings(const ChoiceOfProcesses& choice);
/// Why there are none: a sentence for the user. `what`: "a muster group".
std::string why_none(const ChoiceOfProcesses& choice, const std::string& what);

/// "41.3 s", "2.5 ms", "12.1 us".
std::string time_text(Duration duration);

}  // namespace muster
