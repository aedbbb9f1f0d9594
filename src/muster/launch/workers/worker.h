#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "muster/io/fd.h"
#include "muster/launch/options/options.h"

namespace muster {

struct WorkerSpec {
  int rank = 0;
  std::vector<std::string> command;  ///< the first word is the program's path
  Environment environment;
  bool keeps_stdin = false;  ///< otherwise /dev/null
  std::vector<int> cpus;     ///< to run on; empty: all that this process may
  bool has_terminal = true;  ///< false: in a session of its own, where it cannot ask, nor be stopped for asking
};

/// A worker's standard descriptors, for it to take, and the ends of those pipes that stay here. They are non-blocking.
struct WorkerPipes {
  Fd in, out, err;
  Fd read_out, read_err;

  static Result<WorkerPipes> open(bool keep_stdin);
};

/// Starts a worker as a child that leads a process group of its own, and returns once it runs its program. The kernel
/// kills it when the thread that started it ends. kNotFound or kInvalidArgument names the program when it cannot be
/// run.
Result<pid_t> spawn(const WorkerSpec& spec, const WorkerPipes& pipes);

}  // namespace muster
