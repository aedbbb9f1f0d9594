#pragma once

// Control groups (cgroups) limit the processes of a container or of a scheduler's job. Both versions of the kernel's
// interface are read, in this process's cgroup and in those above it, up to the root of the mount. A file that is
// missing or has unexpected text sets no limit. `root`: the root directory.

#include <optional>
#include <string>

namespace muster {

/// The number of CPUs whose time this process may use, rounded up: the smallest quota of all levels. Empty: no quota.
std::optional<int> cgroup_cpus(const std::string& root = "/");

}  // namespace muster
