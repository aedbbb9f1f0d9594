#pragma once

#include <memory>

#include "muster/io/connection.h"
#include "muster/store/server/server.h"
#include "muster/store/store.h"

namespace muster {

/// The job's store, and in the process that serves it the server.
struct JobStore {
  std::unique_ptr<StoreServer> server;
  std::unique_ptr<Store> store;  ///< destroyed before the server
};

/// Opens the store of the job that this process belongs to: the store of `muster run`, or the one at MASTER_ADDR and
/// MASTER_PORT. `serve`: start a server there if no launcher did; one process of the job must do so.
Result<JobStore> open_job_store(const Credentials& credentials, bool serve, const Deadline& deadline);

/// A number that the launcher has set in the environment, such as RANK. kInvalidArgument if it is not set, or is not a
/// number.
Result<int> job_number(const char* name);

}  // namespace muster
