#include "muster/group/operations.h"

#include <span>

namespace muster {
namespace {

/// True if the two operations can run as one. Operations with uneven blocks cannot, because each has its own layout.
bool can_merge(const Operation& first, const Operation& next) {
  const Call &a = first.call, &b = next.call;
  return a.collective == b.collective && a.dtype == b.dtype && a.op == b.op && a.root == b.root &&
         first.factor == next.factor && a.layout == 0 && b.layout == 0 && a.collective != Collective::kBarrier;
}

/// The blocks of all operations, grouped by rank: each rank's block of the first operation, its block of the second
/// one, and so on. If `ranks` is 1, the result is the memory of all operations in order.
BufferView interleave(std::span<const Operation> operations, BufferView Operation::*side, int ranks) {
  std::vector<Segment> segments;
  for (int rank = 0; rank < ranks; ++rank) {
    for (const Operation& operation : operations) {
      const BufferView& view = operation.*side;
      const size_t block = view.bytes() / ranks;
      view.visit(rank * block, block, [&](uint8_t* data, size_t bytes) { segments.push_back({data, bytes}); });
    }
  }
  return BufferView(segments, (operations.front().*side).dtype());
}

Operation merge(std::span<const Operation> operations, int size) {
  Operation merged = operations.front();
  merged.call.count = 0;
  for (const Operation& operation : operations) merged.call.count += operation.call.count;
  const Collective collective = merged.call.collective;
  const bool all_to_all = collective == Collective::kAllToAll;
  const bool gathers = collective == Collective::kAllGather || collective == Collective::kGather;
  const bool scatters = collective == Collective::kReduceScatter || collective == Collective::kScatter;
  merged.input = interleave(operations, &Operation::input, scatters || all_to_all ? size : 1);
  merged.output = interleave(operations, &Operation::output, gathers || all_to_all ? size : 1);
  return merged;
}

}  // namespace

std::vector<Operation> coalesce(std::vector<Operation> operations, int size) {
  std::vector<Operation> merged;
  for (size_t begin = 0, end = 0; begin < operations.size(); begin = end) {
    for (end = begin + 1; end < operations.size() && can_merge(operations[begin], operations[end]);) ++end;
    merged.push_back(end == begin + 1 ? std::move(operations[begin])
                                      : merge(std::span(operations).subspan(begin, end - begin), size));
  }
  return merged;
}

}  // namespace muster
