#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "muster/io/fd.h"
#include "muster/launch/options/options.h"

namespace muster {

struct WorkerSpec {
  int rank = 0;
  std::vector<std::string> command;  ///< the first word is the path of the program
  Environment environment;
  bool keeps_stdin = false;  ///< false: standard input is /dev/null
  std::vector<int> cpus;     ///< CPUs to run on; empty: the CPUs of this process
  bool has_terminal = true;  ///< false: in a session of its own, where it cannot read from the terminal
};

/// A worker's standard descriptors, and this process's ends of its pipes, which are non-blocking.
struct WorkerPipes {
  Fd in, out, err;
  Fd read_out, read_err;

  static Result<WorkerPipes> open(bool keep_stdin);
};

/// Starts a worker as a child with its own process group. Returns after the child has started its program. The kernel
/// kills the worker when the thread that started it ends. kNotFound or kInvalidArgument if the program cannot run; the
/// message names it.
Result<pid_t> spawn(const WorkerSpec& spec, const WorkerPipes& pipes);

}  // namespace muster
