#pragma once

// Lists, signals and reaps the processes below this one. No other code of the launcher reaps a child.

#include <sys/types.h>

#include <initializer_list>
#include <string>
#include <vector>

#include "muster/base/clock.h"
#include "muster/io/fd.h"

namespace muster {

/// From now on, a descendant whose parent dies becomes a child of this process (PR_SET_CHILD_SUBREAPER). So no
/// descendant can escape.
void adopt_orphans();

/// After a fork: gives these signals their default effect, and unblocks all signals. Async-signal-safe.
void restore_signals(std::initializer_list<int> numbers);

/// A pidfd of any process, not only of a child. Empty if there is no such process.
Fd open_process(pid_t pid);
/// True if the process has ended, or ends within `patience`. True for an empty descriptor.
bool has_ended(const Fd& process, Duration patience = {});
/// Sends a signal. Does nothing for an empty descriptor, and for a process that has ended.
void signal_process(const Fd& process, int number);

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
  /// Children that a signal ended come first, because the end of such a child is more likely the reason why others
  /// failed than the other way round. The kernel lists children by age.
  std::vector<EndedChild> ended;
  bool none_left = false;  ///< true: this process has no child, running or ended
};
/// Reaps all children that have ended. Does not wait.
ReapedChildren reap_children();
/// Waits until this child ends, and reaps it.
void reap_child(pid_t pid);

/// Sends SIGKILL to every running child. An orphan becomes a child when its parent dies, and no signal announces this.
/// So call this and reap_children() until no child is left.
void kill_children();
/// Calls kill_children() and reap_children() until no child is left. Returns false if there are children at the
/// deadline. SIGCHLD must be blocked.
bool kill_all_children(const Deadline& deadline);

}  // namespace muster
