#pragma once

#include <memory>

#include "muster/group/work_state.h"

namespace muster {

/// A send or a receive that was asked for: its Work, and how far it is. Shared by the caller's Work and those who move
/// it; guarded by the P2P engine's lock.
struct MessageOperation : Work::State {
  bool receives = false;
  Rank peer = kNoRank;  ///< a receive's may be kAnyRank: who it is, `source` tells once it is matched
  uint32_t tag = 0;
  BufferView data;
  Deadline deadline = Deadline::after(Duration::zero());

  bool over = false;     ///< finished; nothing may touch `data` any more
  bool matched = false;  ///< message and receive have met: bytes are under way, or will be
  size_t moved = 0;      ///< bytes
  uint64_t id = 0;       ///< of the message, once it is offered
  bool copied = false;   ///< a send that was done before it had a link: its bytes are in `copy`
  Bytes copy;
  size_t place = 0;  ///< among the P2P engine's pending operations

  /// "receive from rank 3 with tag 7 (float32[12])".
  std::string to_string() const;
};
using MessagePtr = std::shared_ptr<MessageOperation>;

/// The stretches of `data` in [offset, offset + bytes).
template <class AnySegment>
std::vector<AnySegment> segments_of(const BufferView& data, size_t offset, size_t bytes) {
  std::vector<AnySegment> segments;
  data.visit(offset, bytes, [&](uint8_t* at, size_t length) { segments.push_back({at, length}); });
  return segments;
}

}  // namespace muster
