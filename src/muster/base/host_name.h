#pragma once

#include <string>

namespace muster {

/// The host's name, or "unknown". For messages only, because containers repeat names.
std::string host_name();

}  // namespace muster
