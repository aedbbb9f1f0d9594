#pragma once

// Control groups (cgroups) limit the processes of a container or of a scheduler's job. Both versions of the kernel's
// interface are read, in this process's cgroup and in those above it, up to the root of the mount. A file that is
// missing or has unexpected text sets no limit. `root`: the root directory.

#include <cstdint>
#include <optional>
#include <string>

namespace muster {

/// The number of CPUs whose time this process may use, rounded up: the smallest quota of all levels. Empty: no quota.
std::optional<int> cgroup_cpus(const std::string& root = "/");

struct CgroupMemory {
  uint64_t oom_kills = 0;         ///< how many processes of this cgroup the out-of-memory killer has killed so far
  std::optional<uint64_t> limit;  ///< in bytes: the smallest limit of all levels
  std::optional<uint64_t> peak;   ///< in bytes: the highest use at the level with that limit, or else of this cgroup
};
CgroupMemory cgroup_memory(const std::string& root = "/");

}  // namespace muster
