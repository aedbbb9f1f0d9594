#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/random.h"
#include "muster/io/socket.h"

namespace muster {

/// Simulates unauthenticated connections to a public port: port scans that close at once, with or without a reset,
/// other protocols (HTTP, TLS, SSH, TCPStore), lengths of 2 GB and more, handshakes that stop half-way or use the wrong
/// secret, and connections that stay open and send nothing. Its own thread makes them as fast as possible. A seed
/// determines them.
class UnauthenticatedPeers {
 public:
  struct Options {
    size_t max_open = 2000;  ///< maximum number of open connections; above it, the oldest ones are closed
    uint64_t seed = 1;
  };
  UnauthenticatedPeers(std::vector<Address> targets, Options options);
  ~UnauthenticatedPeers() { stop(); }
  UnauthenticatedPeers(const UnauthenticatedPeers&) = delete;
  UnauthenticatedPeers& operator=(const UnauthenticatedPeers&) = delete;

  /// Ends the thread and closes every connection.
  void stop();
  /// The number of connections so far. Thread-safe.
  uint64_t accepted() const { return accepted_; }
  /// A summary such as "811 port scans, 790 silent, ...". Must be called after stop().
  std::string summary() const;

 private:
  struct Kind;
  static const std::vector<Kind>& kinds();
  void run();
  void connect_one();

  const std::vector<Address> targets_;
  const Options options_;
  Random random_;
  std::deque<Fd> open_;
  std::vector<uint64_t> counts_;
  std::atomic<uint64_t> accepted_ = 0;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

/// Raises this process's limit of open files to the hard limit.
void raise_descriptor_limit();
/// How long a soak test runs: MUSTER_SOAK_SECONDS, or zero, which means only as long as the test needs.
Duration soak_time();

}  // namespace muster
