#pragma once

#include <string>

#include "muster/base/bytes.h"
#include "muster/io/fd.h"
#include "muster/launch/options/options.h"

namespace muster {

/// Shows a running agent to `muster status`: a file "job-<pid>.json" in the user's private directory (user_directory())
/// with the address and the secret of the job's store. The agent holds a lock on the file while it lives. A file
/// without a lock belongs to a dead agent. The agent's monitor removes it, or the next `muster run` or `muster status`.
class StatusFile {
 public:
  /// If the directory is not usable, there is no file and the job runs without it.
  StatusFile(const Environment& environment, std::string run_id);
  ~StatusFile();
  StatusFile(const StatusFile&) = delete;
  StatusFile& operator=(const StatusFile&) = delete;

  /// Writes the address of the job's store; empty if it is not known.
  void write(const std::string& url, ByteView secret);

 private:
  std::string path_, run_id_;
  Fd file_;
};

/// Removes the files of this user's dead agents, and their directory if it is empty then.
void remove_dead_status_files(const Environment& environment);

}  // namespace muster
