#pragma once

#include <memory>

#include "muster/group/work_state.h"

namespace muster {

/// A send or a receive: its Work, and how far it has come. Shared by the caller's Work and the P2P engine, and guarded
/// by the engine's lock.
struct MessageOperation : Work::State {
  bool receives = false;
  Rank peer = kNoRank;  ///< for a receive perhaps kAnyRank; `source` is the sender once it is matched
  uint32_t tag = 0;
  BufferView data;
  Deadline deadline = Deadline::after(Duration::zero());

  bool over = false;     ///< finished; `data` must not be touched any more
  bool matched = false;  ///< message and receive have met: its bytes move
  size_t moved = 0;      ///< bytes
  uint64_t id = 0;       ///< of the message, once it is announced
  bool copied = false;   ///< a send that ended before it had a link: its bytes are in `copy`
  Bytes copy;
  size_t pending_index = 0;  ///< in the engine's list of pending operations

  /// "receive from rank 3 with tag 7 (float32[12])".
  std::string to_string() const;
};
using MessagePtr = std::shared_ptr<MessageOperation>;

/// The parts of `data` in [offset, offset + bytes).
template <class AnySegment>
std::vector<AnySegment> segments_of(const BufferView& data, size_t offset, size_t bytes) {
  std::vector<AnySegment> segments;
  data.visit(offset, bytes, [&](uint8_t* at, size_t length) { segments.push_back({at, length}); });
  return segments;
}

}  // namespace muster
