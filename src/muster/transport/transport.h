#pragma once

namespace muster {

/// What the links between processes go over.
enum class Transport { kShm, kUnix, kTcp };
inline constexpr Transport kTransports[] = {Transport::kShm, Transport::kUnix, Transport::kTcp};

/// As links of it say of their kind(), and MUSTER_TRANSPORT has it: "shm", "unix", "tcp".
constexpr const char* name(Transport transport) {
  return transport == Transport::kShm ? "shm" : transport == Transport::kUnix ? "unix" : "tcp";
}

}  // namespace muster
