#pragma once

#include <sys/types.h>

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/error.h"

namespace muster {

/// How a worker ended.
struct WorkerExit {
  int rank = 0;
  std::string host;
  pid_t pid = 0;
  int code = 0;
  int signal = 0;  ///< 0: it exited with `code`

  bool ok() const { return code == 0 && signal == 0; }
  /// As a shell would show it: the code, or 128 + signal.
  int status() const { return signal != 0 ? 128 + signal : code; }
  /// "exited with status 1", "was ended by signal 9 (SIGKILL)".
  std::string to_string() const;
};
/// From what waitpid() reported.
WorkerExit worker_exit(int rank, const std::string& host, pid_t pid, int wait_status);

/// The exit status that stands for an error before any worker ran: 127 missing, 126 not runnable, else 1.
int exit_status(const Error& error);

/// Says "muster: COMMAND: MESSAGE" on standard error. Returns `status`.
int print_error(const char* command, const std::string& message, int status);

/// From the last Python traceback of `stderr_text` on; empty when there is none. At most its last 40 lines.
std::string last_traceback(std::string_view stderr_text);
/// What torch's @record left in the file named by TORCHELASTIC_ERROR_FILE (JSON); empty when it is something else.
std::string error_file_traceback(std::string_view json);

/// Leaves in `path` what torch's @record would have, for programs that do not use it: JSON {message: {message,
/// errorCode, extraInfo: {py_callstack, timestamp}}}. A file that is there already stays.
void write_error_file(const std::string& path, const WorkerExit& exit, const std::string& traceback);
/// The same for the whole job, in place of what is there: a copy of `from`, or `report` where that is empty or gone.
void publish_error_file(const std::string& path, const std::string& from, int status, const std::string& report);

/// "0-2, 5". The ranks must be in order.
std::string rank_list(const std::vector<int>& ranks);

/// The report of the failure that ended the job: one sentence, the traceback, or without one the last lines of `err`,
/// and how the other ranks of the node were then: from a state ("running", "exited with status 0") to the ranks in it.
std::string failure_report(const WorkerExit& first, std::string_view traceback, std::string_view err,
                           const std::map<std::string, std::vector<int>>& others);

/// The end of what a worker wrote.
struct OutputTail {
  int rank = 0;
  std::string_view out, err;
};
/// What the other ranks wrote last, to follow a failure_report: a line or a few of each, of a few ranks; those that
/// wrote the same share a line. Empty when none wrote anything.
std::string last_words(const std::vector<OutputTail>& others);

}  // namespace muster
