#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "muster/io/fd.h"
#include "muster/launch/options.h"

namespace muster {

struct WorkerSpec {
  int rank = 0;
  std::vector<std::string> command;  ///< the first word is the program's path
  Environment environment;
  bool keeps_stdin = false;  ///< otherwise /dev/null
};

/// A worker that was started: the leader of a process group of its own. The kernel kills it when the thread that
/// started it ends. The pipes are non-blocking.
struct WorkerProcess {
  pid_t pid = 0;
  Fd out, err;
};

/// Starts a worker, and returns once it runs its program. kNotFound or kInvalidArgument names the program when it
/// cannot be run.
Result<WorkerProcess> spawn(const WorkerSpec& spec);

}  // namespace muster
