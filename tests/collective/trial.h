#pragma once

#include <gmock/gmock.h>

#include <ostream>
#include <string>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/collective/algorithms/algorithms.h"
#include "muster/collective/schedule/execution.h"

namespace muster {
inline std::ostream& operator<<(std::ostream& out, const Algorithm& algorithm) {
  return out << name(algorithm.collective) << "_" << algorithm.name;
}
}  // namespace muster

namespace muster::test {

/// The algorithm with this name, which must exist.
const Algorithm& algorithm(Collective collective, std::string_view name);
/// True if a tensor of the collective has one block for each rank.
bool has_blocks(Collective collective);
/// The name of a parameterized test, such as "all_reduce_ring".
std::string parameter_name(const testing::TestParamInfo<Algorithm>& info);

struct Setting {
  int size = 1;
  size_t count = 1;              ///< elements of the tensor, or of one rank's block
  Dtype dtype = Dtype::kUint64;  ///< reductions: kUint64 and kUint8 are compared exactly; kFloat32, kFloat16 and
                                 ///< kBfloat16: equal bits, and near the sum
  Rank root = 0;
  size_t chunk_bytes = 1 << 18;
  bool in_place = true;   ///< if operation.h allows input and output to share memory
  bool uneven = false;    ///< blocks of 0 to 2 * count elements, if the collective supports them
  bool segments = false;  ///< buffers in several segments
  uint64_t seed = 1;
};

/// One collective of all ranks: their schedules, their filled memory, and a check of the result against the plain
/// definition. The test decides how the schedules run.
class Trial {
 public:
  Trial(const Algorithm& algorithm, const Setting& setting);

  int size() const { return setting_.size; }
  Dtype dtype() const { return setting_.dtype; }
  const Schedule& schedule(Rank rank) const { return schedules_[rank]; }
  Buffers buffers(Rank rank) const;
  MutableByteView scratch(Rank rank) { return scratch_[rank]; }
  /// The memory that the schedule's ranges of a buffer kind refer to.
  MutableByteView memory(Rank rank, BufferKind buffer);
  /// The first fault. Empty if every rank's output is right and no other memory was written.
  std::string fault() const;
  /// The same for one rank; the other ranks may have failed.
  std::string fault_of(Rank rank) const;
  std::string name() const;

 private:
  struct RankMemory {
    Bytes original;         ///< copy of the input
    Bytes memory, outside;  ///< the longer one of input and output, and the shorter one if the call is not in place
    MutableByteView input, output;
  };

  CollectiveSpec spec(Rank rank) const;
  void choose_counts();
  void lay_out(Rank rank);
  size_t input_count(Rank rank) const;
  size_t output_count(Rank rank) const;
  size_t blocks_before(Rank rank) const;
  BufferView view(MutableByteView memory, uint64_t seed) const;
  double tolerance(double sum) const;
  std::string reduced_fault(Rank rank) const;
  Bytes moved(Rank rank) const;
  bool input_is_whole(Rank rank) const;

  Algorithm algorithm_;
  Setting setting_;
  /// By rank: elements of its block. For all_to_all by sender, then by receiver.
  std::vector<std::vector<size_t>> counts_;
  std::vector<Schedule> schedules_;
  std::vector<RankMemory> ranks_;
  std::vector<Bytes> scratch_;
};

/// Counts that are and are not multiples of the size: {0, 1, 2, size - 1, size, size + 1, 1000, 12345}.
std::vector<size_t> boundary_counts(int size);

}  // namespace muster::test
