#include "muster/group/operations.h"

namespace muster {
namespace {

/// True if the two operations can run as one. Operations with uneven blocks cannot, because each has its own layout.
bool can_merge(const Operation& first, const Operation& next) {
  const Call &a = first.call, &b = next.call;
  return a.collective == b.collective && a.dtype == b.dtype && a.op == b.op && a.root == b.root &&
         first.factor == next.factor && a.layout == 0 && b.layout == 0 && a.collective != Collective::kBarrier;
}

/// The blocks of all calls, grouped by rank: each rank's block of the first call, its block of the second call, and so
/// on. If `ranks` is 1, the result is the memory of all calls in order.
BufferView interleave(const std::vector<const BufferView*>& views, int ranks) {
  std::vector<Segment> segments;
  for (int rank = 0; rank < ranks; ++rank) {
    for (const BufferView* view : views) {
      const size_t block = view->bytes() / ranks;
      view->visit(rank * block, block, [&](uint8_t* data, size_t bytes) { segments.push_back({data, bytes}); });
    }
  }
  return BufferView(std::move(segments), views.front()->dtype());
}

bool gathers(Collective collective) {
  return collective == Collective::kAllGather || collective == Collective::kGather;
}
bool scatters(Collective collective) {
  return collective == Collective::kReduceScatter || collective == Collective::kScatter;
}

Operation merge(const std::vector<Operation>& operations, size_t begin, size_t end, int size) {
  Operation merged = operations[begin];
  std::vector<const BufferView*> inputs, outputs;
  merged.call.count = 0;
  for (size_t i = begin; i < end; ++i) {
    merged.call.count += operations[i].call.count;
    inputs.push_back(&operations[i].input);
    outputs.push_back(&operations[i].output);
  }
  const Collective collective = merged.call.collective;
  const bool all_to_all = collective == Collective::kAllToAll;
  merged.input = interleave(inputs, scatters(collective) || all_to_all ? size : 1);
  merged.output = interleave(outputs, gathers(collective) || all_to_all ? size : 1);
  return merged;
}

}  // namespace

std::vector<Operation> coalesce(std::vector<Operation> operations, int size) {
  std::vector<Operation> merged;
  for (size_t begin = 0, end = 0; begin < operations.size(); begin = end) {
    for (end = begin + 1; end < operations.size() && can_merge(operations[begin], operations[end]);) ++end;
    merged.push_back(end == begin + 1 ? std::move(operations[begin]) : merge(operations, begin, end, size));
  }
  return merged;
}

}  // namespace muster
