#pragma once

// The processes below this one: how they are listed, signalled and reaped. No other code of the launcher reaps a child.

#include <sys/types.h>

#include <string>
#include <vector>

#include "muster/base/clock.h"
#include "muster/io/fd.h"

namespace muster {

/// From now on a descendant whose parent dies becomes a child of this process (PR_SET_CHILD_SUBREAPER), so that none
/// can escape.
void adopt_orphans();

/// A pidfd of any process, not only of a child. Empty if there is no such process.
Fd open_process(pid_t pid);
/// True if the process has ended, or ends within `patience`. True for an empty descriptor.
bool has_ended(const Fd& process, Duration patience = {});
/// SIGKILL; nothing for an empty descriptor.
void kill_process(const Fd& process);

struct ChildProcess {
  pid_t pid = 0;
  std::string name;  ///< from the kernel, at most 15 bytes
};
/// The children of this process that still run.
std::vector<ChildProcess> running_children();

struct EndedChild {
  pid_t pid = 0;
  int status = 0;  ///< as waitpid() reports it
};
struct ReapedChildren {
  /// First those that a signal ended: the end of such a child is more likely the reason why others failed than the
  /// other way round, and the kernel lists children by age.
  std::vector<EndedChild> ended;
  bool none_left = false;  ///< this process has no child, running or ended
};
/// Reaps all children that have ended. Does not wait.
ReapedChildren reap_children();
/// Waits until this child ends, and reaps it.
void reap_child(pid_t pid);

/// SIGKILL to every child that runs. An orphan becomes a child when its parent dies, and no signal announces this: so
/// call this and reap_children() until none is left.
void kill_children();
/// Does so. False if some children were left at the deadline. SIGCHLD must be blocked.
bool kill_all_children(const Deadline& deadline);

}  // namespace muster
