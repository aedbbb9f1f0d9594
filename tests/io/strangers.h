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

/// What comes to a port that others can reach: scanners that close at once, in order or not, other protocols (HTTP,
/// TLS, SSH, TCPStore), lengths of 2 GB and more, handshakes that stop half way or prove the wrong secret, and
/// connections that say nothing and stay. From a thread of its own, as fast as it can, from a seed.
class Strangers {
 public:
  struct Options {
    size_t most_open = 2000;  ///< connections that stay at a time; for more, the oldest of them are closed
    uint64_t seed = 1;
  };
  Strangers(std::vector<Address> targets, Options options);
  ~Strangers() { stop(); }
  Strangers(const Strangers&) = delete;
  Strangers& operator=(const Strangers&) = delete;

  /// Ends the thread and closes every connection.
  void stop();
  /// Connections so far. Thread-safe.
  uint64_t came() const { return came_; }
  /// "811 port scans, 790 silent, ..."; after stop().
  std::string figures() const;

 private:
  struct Kind;
  static const std::vector<Kind>& kinds();
  void run();
  void come();

  const std::vector<Address> targets_;
  const Options options_;
  Random random_;
  std::deque<Fd> open_;
  std::vector<uint64_t> counts_;
  std::atomic<uint64_t> came_ = 0;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

/// Lets this process open as many files as it may.
void raise_descriptor_limit();
/// How long a test is to go on: MUSTER_SOAK_SECONDS, or no longer than it must (zero).
Duration soak_time();

}  // namespace muster
