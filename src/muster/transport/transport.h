#pragma once

namespace muster {

/// The transports of links between processes.
enum class Transport { kShm, kUnix, kTcp };
inline constexpr Transport kTransports[] = {Transport::kShm, Transport::kUnix, Transport::kTcp};

/// "shm", "unix", "tcp": as in Link::kind() and MUSTER_TRANSPORT.
constexpr const char* name(Transport transport) {
  return transport == Transport::kShm ? "shm" : transport == Transport::kUnix ? "unix" : "tcp";
}

}  // namespace muster
