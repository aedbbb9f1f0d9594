#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/random.h"
#include "muster/io/socket.h"

namespace muster {

/// The faults that the relay injects. A chance applies to each piece that the relay reads from a socket.
struct RelayFaults {
  double cut = 0;    ///< both connections end after a random part of the piece
  double split = 0;  ///< a random part is sent now, the rest after a delay
  double delay = 0;  ///< the piece, and all bytes behind it, are delayed
  Duration max_delay = 3ms;
};

/// A TCP relay on a loopback port that injects faults. A seed determines the faults. The relay has its own thread.
class FaultRelay {
 public:
  FaultRelay(Address target, RelayFaults faults, uint64_t seed);
  ~FaultRelay();
  FaultRelay(const FaultRelay&) = delete;
  FaultRelay& operator=(const FaultRelay&) = delete;

  const Address& address() const { return address_; }
  std::string url() const { return "tcp://" + address_.to_string(); }
  /// Sets the target of new connections. Existing connections stay. Thread-safe, as are the functions below.
  void retarget(Address target);
  /// Closes all existing connections and drops the bytes on their way.
  void cut_all();
  /// Stops all traffic and accepts no connection until it is called with false.
  void hold(bool held);
  uint64_t cuts() const { return cuts_; }

 private:
  struct Direction {  // from one socket to the other
    Bytes pending;
    TimePoint not_before;
    size_t until_cut = SIZE_MAX;  // bytes that are still sent before the cut
    bool ended = false;           // the sender has closed the connection
  };
  struct Pair {
    Fd ends[2];
    Direction directions[2];  // 0: from ends[0] to ends[1]
    bool gone = false;
  };

  void serve();
  void accept_all();
  void read_from(Pair& pair, int end);
  void write_to(Pair& pair, int end);
  void misbehave(Direction& direction, size_t piece);
  void cut(Pair& pair);
  int poll_timeout_ms() const;

  std::mutex mutex_;
  Address target_;  // guarded by mutex_
  const RelayFaults faults_;
  Random random_;
  Fd listener_, wake_;
  Address address_;
  std::vector<std::unique_ptr<Pair>> pairs_;
  std::atomic<bool> stop_ = false, held_ = false, cut_all_ = false;
  std::atomic<uint64_t> cuts_ = 0;
  std::thread thread_;
};

}  // namespace muster
