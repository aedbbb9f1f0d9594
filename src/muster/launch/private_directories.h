#pragma once

// Directories for muster's files on this host. Locks show whether the process that made a file still runs.

#include <string>

#include "muster/io/address.h"
#include "muster/io/fd.h"
#include "muster/launch/options/options.h"

namespace muster {

/// Creates or replaces a file, and locks it for this process. The file gets its name after it is locked, so a file
/// without a lock belongs to a dead process. Empty on failure, with the reason in errno.
Fd make_locked_file(const std::string& path);

/// Removes a file of make_locked_file() if its process has died. Returns true if it removed the file.
bool remove_abandoned_file(const std::string& path);

/// The directory where this user's processes on this host find each other: in $XDG_RUNTIME_DIR, else in /tmp. With
/// `create` it is made with mode 0700 if it does not exist. kUnavailable if it belongs to another user or other users
/// can enter it. Its path is short enough for sockets in it with names of up to 32 bytes.
///
/// Another process may remove the directory while it is empty. So make it again if a file in it cannot be created with
/// ENOENT, or use lock_user_directory().
Result<std::string> user_directory(const Environment& environment, bool create = true);

/// Makes user_directory() if necessary, and locks it: no other process can lock or remove it.
Result<Fd> lock_user_directory(const Environment& environment);

/// Removes user_directory() if it is empty and not locked. Processes call it after they have removed their own files,
/// so that the last one leaves nothing behind.
void remove_user_directory(const std::string& directory);

/// The address of a Unix socket. kInvalidArgument if the path is too long.
Result<Address> socket_at(const std::string& path);

/// TMPDIR if it is a directory, else /tmp. Absolute.
std::string temporary_directory();

/// A temporary directory for the workers' error files. The monitor removes it, or the agent if the monitor was killed.
/// If both were killed, the next run of this user removes it. Both hold a lock in it, which shows whether one of them
/// lives.
class ScratchDirectory {
 public:
  /// On failure path() is empty and errno has the reason.
  ScratchDirectory();
  ~ScratchDirectory() { remove(); }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;

  void remove() const;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  Fd lock_;
};

}  // namespace muster
