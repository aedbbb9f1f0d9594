#include "muster/transport/link.h"

#include <fmt/format.h>

namespace muster {

std::string Peer::to_string() const { return fmt::format("rank {} (host {}, pid {})", rank, host, pid); }

}  // namespace muster
