#include "muster/collective/call.h"

#include <fmt/format.h>

namespace muster {

const char* name(Collective collective) {
  switch (collective) {
    case Collective::kAllReduce:
      return "all_reduce";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kAllGather:
      return "all_gather";
    case Collective::kBarrier:
      return "barrier";
  }
  return "unknown collective";
}

std::string Call::to_string() const {
  switch (collective) {
    case Collective::kBarrier:
      return fmt::format("barrier #{}", sequence);
    case Collective::kAllReduce:
      return fmt::format("all_reduce #{} ({}[{}], {})", sequence, name(dtype), count, name(op));
    case Collective::kBroadcast:
      return fmt::format("broadcast #{} ({}[{}], root {})", sequence, name(dtype), count, root);
    case Collective::kAllGather:
      return fmt::format("all_gather #{} ({}[{}])", sequence, name(dtype), count);
  }
  return fmt::format("call {} #{}", static_cast<int>(collective), sequence);
}

std::array<uint64_t, 4> Call::pack() const {
  const uint64_t kinds = static_cast<uint64_t>(collective) | static_cast<uint64_t>(dtype) << 8 |
                         static_cast<uint64_t>(op) << 16 | static_cast<uint64_t>(static_cast<uint32_t>(root)) << 32;
  return {kinds, count, sequence, 0};
}

Call Call::unpack(const std::array<uint64_t, 4>& words) {
  Call call;
  call.collective = static_cast<Collective>(words[0] & 0xff);
  // Written by a peer: values out of range become the first, so that printing them is safe.
  const auto dtype = words[0] >> 8 & 0xff;
  call.dtype = static_cast<Dtype>(dtype < kDtypeCount ? dtype : 0);
  const auto op = words[0] >> 16 & 0xff;
  call.op = static_cast<ReduceOp>(op < kReduceOpCount ? op : 0);
  call.root = static_cast<Rank>(words[0] >> 32);
  call.count = words[1];
  call.sequence = words[2];
  return call;
}

}  // namespace muster
