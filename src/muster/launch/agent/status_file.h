#pragma once

#include <string>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/io/fd.h"
#include "muster/launch/options/options.h"

namespace muster {

/// Tells `muster status` of an agent that runs: a file "job-<pid>.json" in the user's folder (user_folder()), which
/// nobody else can enter, with where the job's store is and the secret that it takes. The agent holds a lock on it as
/// long as it lives; a file without one is a dead agent's. Its guard removes that, or else the next run or `muster
/// status`.
class StatusFile {
 public:
  /// Without a file, as where the folder is not usable, nothing is told; a job does not fail for that.
  StatusFile(const Environment& environment, std::string run_id);
  ~StatusFile();
  StatusFile(const StatusFile&) = delete;
  StatusFile& operator=(const StatusFile&) = delete;

  /// The agent has found its job's store.
  void store_found(const std::string& url, ByteView secret);

 private:
  void write(const std::string& url, ByteView secret);
  std::string path_, run_id_;
  Fd file_;
};

/// Removes the files of this user's agents that have died without doing so themselves.
void remove_dead_status_files(const Environment& environment);

}  // namespace muster
