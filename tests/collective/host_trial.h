#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/collective/host/host_collectives.h"

namespace muster::test {

/// Ranks as threads, each attached to one host communicator's memory.
class HostCommRanks {
 public:
  explicit HostCommRanks(int size, size_t slot_bytes = size_t{512} << 10);
  int size() const { return static_cast<int>(comms_.size()); }
  HostComm& comm(Rank rank) { return *comms_[rank]; }
  /// Gives each rank an arena. Must be called before the first run().
  void use_arenas();
  Arena& arena(Rank rank) { return *arenas_[rank]; }
  /// Runs `body` for each rank, each on its own thread.
  void run(const std::function<void(Rank, HostComm&)>& body);

 private:
  std::vector<std::unique_ptr<HostComm>> comms_;
  std::vector<std::shared_ptr<Arena>> arenas_;
};

/// Allocates from the ranks' arenas and frees all of it in its destructor.
class ArenaBlocks {
 public:
  explicit ArenaBlocks(HostCommRanks& ranks) : ranks_(ranks) {}
  ~ArenaBlocks() {
    for (const auto& [rank, data] : blocks_) ranks_.arena(rank).free(data);
  }
  uint8_t* operator()(Rank rank, size_t bytes);

 private:
  HostCommRanks& ranks_;
  std::vector<std::pair<Rank, void*>> blocks_;
};

/// One collective of all ranks on random data. Its result is compared with the plain definition.
struct HostCommCase {
  Collective collective = Collective::kAllReduce;
  Dtype dtype = Dtype::kInt32;
  ReduceOp op = ReduceOp::kSum;
  Rank root = 0;
  size_t count = 1;       ///< elements of a block, or of the tensor
  bool uneven = false;    ///< blocks of lengths around `count`, some empty
  bool in_place = false;  ///< input and output are the same memory, if the collective allows it
  size_t segments = 1;    ///< number of segments of every buffer
  uint64_t seed = 1;
  uint64_t sequence = 1;
};
std::string to_string(const HostCommCase& trial);

/// Provides the memory of tensors.
using Provider = std::function<uint8_t*(Rank, size_t bytes)>;
/// Runs the case and returns the first fault, or an empty string. Bytes outside of the result must not change.
std::string fault_of(HostCommRanks& ranks, const HostCommCase& trial, const Provider& provider = {});

}  // namespace muster::test
