#pragma once

#include <string>

namespace muster {

/// What the host calls itself, "unknown" where it does not say. For people to read: containers repeat names.
std::string host_name();

}  // namespace muster
