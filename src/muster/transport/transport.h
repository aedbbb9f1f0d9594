#pragma once

#include <string>
#include <vector>

#include "muster/base/error.h"

namespace muster {

/// The transports of links between processes.
enum class Transport { kShm, kUnix, kTcp };
inline constexpr Transport kTransports[] = {Transport::kShm, Transport::kUnix, Transport::kTcp};

/// "shm", "unix", "tcp": as in Link::kind() and MUSTER_TRANSPORT.
constexpr const char* name(Transport transport) {
  return transport == Transport::kShm ? "shm" : transport == Transport::kUnix ? "unix" : "tcp";
}
/// Parses names that are separated by commas: "shm,tcp". kInvalidArgument for another word.
Result<std::vector<Transport>> parse_transports(const std::string& text);

}  // namespace muster
