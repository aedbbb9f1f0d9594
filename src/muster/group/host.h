#pragma once

#include <string>

#include "muster/base/host_name.h"
#include "muster/io/address.h"

namespace muster {

/// What tells processes that can share memory and Unix sockets from those that can't: the kernel's boot id, the network
/// namespace and the user. Never a host name, which containers repeat, nor a count of local ranks, which sub-groups
/// break.
std::string shared_memory_domain();
/// The pid namespace's number; 0 when it can't be told, and then unlike any other.
uint64_t process_domain();

/// The address to bind so that other hosts reach it: of the first interface that is up and not loopback, IPv4 before
/// IPv6; loopback when there is no other.
Address outward_address();

}  // namespace muster
