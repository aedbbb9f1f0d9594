#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "muster/base/clock.h"
#include "muster/io/fd.h"

namespace muster {

/// From now on a descendant whose parent dies becomes this process' child (PR_SET_CHILD_SUBREAPER), so that none can
/// slip away.
void adopt_orphans();

/// A pidfd: of any process, another's child too. Empty where there is none.
Fd open_process(pid_t pid);
/// Whether it has ended, or does within `patience`. True of an empty one.
bool has_ended(const Fd& process, Duration patience = {});

struct ChildProcess {
  pid_t pid = 0;
  std::string name;  ///< as the kernel has it, at most 15 bytes
};
/// This process' children that still run.
std::vector<ChildProcess> running_children();

/// Kills every child, and every orphan that becomes one, until there is none. False if some were left at the deadline.
/// SIGCHLD must be blocked.
bool kill_all_children(const Deadline& deadline);

}  // namespace muster
