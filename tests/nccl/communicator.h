#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace muster::fake_nccl {

/// A part of an operation: bytes to or from a peer.
struct Transfer {
  bool sends = false;
  int peer = 0;
  uint8_t* data = nullptr;
  size_t bytes = 0;
  size_t moved = 0;
};

/// The ranks of a communicator on one host. Bytes go through shared memory with a window for each pair of ranks.
class Communicator {
 public:
  static constexpr int kRemoteError = 6, kInProgress = 7;

  Communicator(std::string name, int size, int rank);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const int size, rank;
  std::atomic<int> error = kInProgress;  ///< until all ranks have come
  std::atomic<bool> aborted = false;
  std::atomic<int> kernels = 0;  ///< in streams, and in graphs

  /// Waits for the other ranks.
  void connect();
  /// Moves the bytes of all transfers, those with one peer in their order. False if the communicator is aborted.
  bool run(std::vector<Transfer>& transfers);

 private:
  struct Window;
  struct Header {
    std::atomic<int> arrived;
  };
  Window& window(int from, int to) const;
  bool move(Transfer& transfer) const;

  const std::string name_;
  const size_t bytes_;
  uint8_t* memory_;
};

}  // namespace muster::fake_nccl
