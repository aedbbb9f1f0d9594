#pragma once

#include <cstdint>
#include <string>

namespace muster {

// What two processes share is told by these, never by a host's name, which containers repeat, nor by a count of local
// ranks, which sub-groups break. Nor by a namespace's number alone: every machine numbers its first ones alike.

/// The kernel's boot id: one for each machine and boot. Empty when it can't be told.
std::string boot_id();
/// The PID namespace's number on this machine; 0 when it can't be told.
uint64_t pid_namespace();

/// Equal means: can share memory and Unix sockets. The boot id, the network namespace and the user; when one can't be
/// told, unlike any other.
std::string shared_memory_domain();
/// Equal means: a process number of one means the same process to the other, so that it may watch that process and look
/// into it. The boot id and the PID namespace; when one can't be told, unlike any other.
std::string process_domain();

}  // namespace muster
