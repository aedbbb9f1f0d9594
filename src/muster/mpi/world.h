#pragma once

#include <functional>
#include <string>

#include "muster/mpi/library.h"

namespace muster::mpi {

/// MPI_COMM_WORLD of this process. Thread-safe.
struct World {
  const Library& mpi;
  int rank = 0;
  int size = 1;

  /// Initializes MPI with MPI_THREAD_MULTIPLE at the first call, unless the program has done so. MPI that muster has
  /// initialized is finalized when the process ends.
  ///
  /// kUnavailable: there is no MPI library. kUnsupported: it has not enough support of threads, or this process was
  /// forked from one that uses MPI. kInvalidArgument: the launcher, or RANK and WORLD_SIZE, name another rank or size
  /// than MPI does. kAborted: MPI has been finalized.
  static Result<const World*> get();
  /// The same, if get() has succeeded in this process. Null otherwise.
  static const World* current();

  /// Ends all ranks of the job. Does not return.
  [[noreturn]] void abort(const std::string& why) const;
  /// A group has failed, so MPI_Finalize() may wait for a rank that does not come: from now on it has a deadline.
  /// Without a failure it has none, because another rank may work for as long as it likes.
  static void expect_failures();
  /// True until MPI is finalized.
  bool is_running() const;
  /// For what must live until all ranks have ended: runs after MPI_Finalize(), if muster calls that.
  static void after_finalize(std::function<void()> callback);
};

}  // namespace muster::mpi
