#pragma once

#include "muster/base/host_name.h"
#include "muster/io/address.h"

namespace muster {

/// An address that other hosts can reach: the address of the first interface that is up and not loopback, IPv4 before
/// IPv6. Loopback if there is no such interface.
Address outward_address();

}  // namespace muster
