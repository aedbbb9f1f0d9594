#pragma once

#include <memory>
#include <string>
#include <vector>

#include "muster/group/group.h"

namespace muster::mpi {

/// The place of this process in MPI_COMM_WORLD.
struct Position {
  Rank rank = 0;
  int size = 1;
  std::string library;  ///< "Open MPI 4.1.4"
};

/// Initializes MPI if the program has not done so, with the ranks of `muster run` if that has started it
/// (pmi_server.h, pmix_server.h). Open MPI 4 and 5, MPICH 4 and libraries with the ABI of MPI 5 are loaded at run time.
/// Errors: as World::get() in mpi/world.h has them.
Result<Position> position();

/// Forms a group over MPI of these ranks of MPI_COMM_WORLD, which become ranks 0, 1, ... in that order. All of them
/// must call this with the same list and name.
///
/// The group is as any other, but for what MPI cannot do:
/// - A collective or a send that has begun cannot be ended. If it does not end within its timeout, all ranks of the job
///   end (MPI_Abort). The same happens if it has not ended 10 s after abort() or leave().
/// - abort() and leave() do not tell the other ranks.
/// - Calls of ranks are not compared.
/// - merge() is kUnsupported, and shrink() needs living ranks.
Result<std::unique_ptr<Group>> form_group(const std::vector<Rank>& world_ranks, const std::string& name,
                                          const GroupOptions& options);

/// Ends all ranks of the job, if this process uses MPI through muster. For a program that ends by an error:
/// MPI_Finalize(), which muster calls at the end of the process, waits for all ranks.
void abort_job(const std::string& why);

}  // namespace muster::mpi
