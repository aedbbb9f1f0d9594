#include "muster/collective/call.h"

#include <fmt/format.h>

namespace muster {

const char* name(Collective collective) {
  static constexpr const char* kNames[kCollectiveCount] = {
      "unknown collective", "all_reduce", "broadcast", "all_gather", "barrier", "reduce", "scatter", "gather",
      "reduce_scatter",     "all_to_all"};
  return kNames[static_cast<int>(collective) < kCollectiveCount ? static_cast<int>(collective) : 0];
}

std::string Call::to_string() const {
  if (collective == Collective::kBarrier) return fmt::format("barrier #{}", sequence);
  std::string text = fmt::format("{} #{} ({}[{}]", name(collective), sequence, name(dtype), count);
  if (layout != 0) text += " in uneven blocks";
  if (reduces(collective)) text += fmt::format(", {}", name(op));
  if (has_root(collective)) text += fmt::format(", root {}", root);
  return text + ")";
}

Call Call::unpack(const std::array<uint64_t, 4>& words) {
  Call call;
  const auto collective = words[0] & 0xff;
  call.collective = static_cast<Collective>(collective < kCollectiveCount ? collective : 0);
  // A peer wrote these words. Values out of range become zero, so that printing them is safe.
  const auto dtype = words[0] >> 8 & 0xff;
  call.dtype = static_cast<Dtype>(dtype < kDtypeCount ? dtype : 0);
  const auto op = words[0] >> 16 & 0xff;
  call.op = static_cast<ReduceOp>(op < kReduceOpCount ? op : 0);
  call.root = static_cast<Rank>(words[0] >> 32);
  call.count = words[1];
  call.sequence = words[2];
  call.layout = words[3];
  return call;
}

}  // namespace muster
