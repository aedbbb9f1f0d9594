#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace muster {

// These functions tell what two processes share. Host names do not, because containers repeat them. Numbers of
// namespaces alone do not either, because every machine gives its first namespaces the same numbers.

/// The kernel's boot id, unique for each machine and boot. Empty: unknown.
std::string boot_id();
/// The PID namespace's number on this machine; 0: unknown.
uint64_t pid_namespace();

/// Two processes with equal values can share memory and Unix sockets. It consists of the boot id, the network namespace
/// and the user. If one of these is unknown, the value is unique.
std::string shared_memory_domain();
/// For two processes with equal values, a PID means the same process. It consists of the boot id and the PID namespace.
/// If one of these is unknown, the value is unique.
std::string process_domain();

/// A process as other processes know it. On another host, or in another PID namespace, its PID means another process.
struct ProcessIdentity {
  pid_t pid = 0;
  std::string domain;  ///< process_domain() of the process; empty: unknown
};

}  // namespace muster
