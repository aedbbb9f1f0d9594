#pragma once

#include "muster/base/host_name.h"
#include "muster/io/address.h"

namespace muster {

/// The address to bind so that other hosts reach it: of the first interface that is up and not loopback, IPv4 before
/// IPv6; loopback when there is no other.
Address outward_address();

}  // namespace muster
