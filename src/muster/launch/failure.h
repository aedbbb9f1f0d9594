#pragma once

#include <sys/types.h>

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/error.h"
#include "muster/launch/cgroup.h"

namespace muster {

/// How a worker ended.
struct WorkerExit {
  int rank = 0;
  std::string host;
  pid_t pid = 0;
  int code = 0;
  int signal = 0;     ///< 0: it exited with `code`
  std::string cause;  ///< why the signal was sent, if that is known

  bool ok() const { return code == 0 && signal == 0; }
  /// The status that a shell shows: the code, or 128 + signal.
  int status() const { return signal != 0 ? 128 + signal : code; }
  /// "exited with status 1", "was ended by signal 9 (SIGKILL)"; with a cause: "... (SIGKILL): CAUSE".
  std::string to_string() const;
};
/// Converts the status that waitpid() reported.
WorkerExit worker_exit(int rank, const std::string& host, pid_t pid, int wait_status);

/// The cause of a SIGKILL by the kernel's out-of-memory killer, with the limit and the peak of the memory.
std::string out_of_memory_cause(const CgroupMemory& memory);

/// The exit status for an error before any worker ran: 127 if a program is missing, 126 if it cannot run, else 1.
int exit_status(const Error& error);

/// Prints "muster: COMMAND: MESSAGE" to standard error, without COMMAND if that is empty. Returns `status`.
int print_error(std::string_view command, const std::string& message, int status);

/// The end of `stderr_text`, beginning with its last Python traceback; at most 40 lines. Empty without a traceback.
std::string last_traceback(std::string_view stderr_text);
/// The traceback in the JSON that torch's @record writes to TORCHELASTIC_ERROR_FILE. Empty if the text is not that
/// JSON.
std::string error_file_traceback(std::string_view json);

/// Writes the file that torch's @record would write, for programs that do not use @record: JSON {message: {message,
/// errorCode, extraInfo: {py_callstack, timestamp}}}. Keeps a file that exists.
void write_error_file(const std::string& path, const WorkerExit& exit, const std::string& traceback);
/// Writes this file for the whole job. It replaces an existing file by a copy of `from`, or by `report` if `from` is
/// empty.
void publish_error_file(const std::string& path, const std::string& from, int status, const std::string& report);

/// "0-2, 5". The ranks must be in order.
std::string rank_list(const std::vector<int>& ranks);

/// The report of the failure that ended the job: one sentence, the traceback (or else the last lines of `err`), and the
/// states of the node's other ranks. `others` maps a state ("running", "exited with status 0") to the ranks in it.
std::string failure_report(const WorkerExit& first, std::string_view traceback, std::string_view err,
                           const std::map<std::string, std::vector<int>>& others);

/// The last output of a worker.
struct OutputTail {
  int rank = 0;
  std::string_view out, err;
};
/// The last lines of a few other ranks, for the end of a failure_report(). Ranks with the same output are grouped.
/// Empty if no rank has written anything.
std::string output_tails(const std::vector<OutputTail>& others);

}  // namespace muster
