#pragma once

#include <gmock/gmock.h>

#include <ostream>
#include <string>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/collective/execution.h"
#include "muster/collective/schedule.h"

namespace muster::test {

enum class Shape { kAllReduce, kBroadcast, kAllGather, kBarrier };

/// One schedule function and what it must do.
struct Algorithm {
  const char* name;
  Shape shape;
  Schedule (*plan)(const Problem&);
};
inline std::ostream& operator<<(std::ostream& out, const Algorithm& algorithm) { return out << algorithm.name; }

inline const std::vector<Algorithm> kAlgorithms = {
    {"RingAllReduce", Shape::kAllReduce, ring_all_reduce},
    {"RecursiveDoublingAllReduce", Shape::kAllReduce, recursive_doubling_all_reduce},
    {"BinomialBroadcast", Shape::kBroadcast, binomial_broadcast},
    {"RingAllGather", Shape::kAllGather, ring_all_gather},
    {"BruckAllGather", Shape::kAllGather, bruck_all_gather},
    {"DisseminationBarrier", Shape::kBarrier, dissemination_barrier},
    {"ChooseAllReduce", Shape::kAllReduce, choose_all_reduce},
    {"ChooseBroadcast", Shape::kBroadcast, choose_broadcast},
    {"ChooseAllGather", Shape::kAllGather, choose_all_gather},
};

struct Setting {
  int size = 1;
  size_t count = 1;
  Dtype dtype = Dtype::kUint64;  ///< kUint64: compared exactly; kFloat32: all ranks' bits equal, and near the sum
  Rank root = 0;
  size_t chunk_bytes = 1 << 18;
  bool in_place = true;
  uint64_t seed = 1;
};

/// One collective of all ranks: their schedules and filled memory, and the check of the result against the plain
/// definition. Who runs the schedules is up to the test.
class Trial {
 public:
  Trial(const Algorithm& algorithm, const Setting& setting);

  int size() const { return setting_.size; }
  const Schedule& schedule(Rank rank) const { return schedules_[rank]; }
  Buffers buffers(Rank rank);
  MutableByteView scratch(Rank rank) { return scratch_[rank]; }
  MutableByteView output(Rank rank) { return outputs_[rank]; }
  size_t input_bytes() const { return setting_.count * size_of(setting_.dtype); }
  /// Empty when every rank's output is right, else the first fault.
  std::string fault() const;
  std::string name() const;

 private:
  void fill();
  uint8_t* input(Rank rank);
  size_t output_bytes() const;
  std::string reduced_fault() const;
  std::string moved_fault() const;

  Algorithm algorithm_;
  Setting setting_;
  std::vector<Schedule> schedules_;
  std::vector<Bytes> originals_, inputs_, outputs_, scratch_;
};

/// Counts that divide evenly and not: {0, 1, 2, size - 1, size, size + 1, 1000, 12345}.
std::vector<size_t> telling_counts(int size);

}  // namespace muster::test
