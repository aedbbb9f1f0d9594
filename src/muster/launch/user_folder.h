#pragma once

#include <string>

#include "muster/io/address.h"
#include "muster/launch/options/options.h"

namespace muster {

/// The user's folder for what this user's processes on this host find each other by: in $XDG_RUNTIME_DIR, else /tmp.
/// Made with mode 0700 where missing; kUnavailable names one that is somebody else's or open to others. Short enough
/// for sockets in it with names of up to 32 bytes.
Result<std::string> user_folder(const Environment& environment);

/// Of a Unix socket; kInvalidArgument when the path is too long for one.
Result<Address> socket_at(const std::string& path);

}  // namespace muster
