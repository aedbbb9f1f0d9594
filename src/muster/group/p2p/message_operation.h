#pragma once

#include <memory>

#include "muster/group/work_state.h"

namespace muster {

/// A send or a receive: its Work and its progress. Shared by the caller's Work and the P2P engine. The engine's lock
/// guards the fields below.
struct MessageOperation : Work::State {
  bool receives = false;
  Rank peer = kNoRank;  ///< a receive may have kAnyRank; `source` is the sender once the receive is matched
  uint32_t tag = 0;
  BufferView data;
  Deadline deadline = Deadline::after(Duration::zero());

  bool over = false;     ///< finished; `data` must not be touched any more
  bool matched = false;  ///< the message and its receive are matched, and bytes may be moving
  size_t moved = 0;      ///< bytes sent or received so far
  uint64_t id = 0;       ///< message id, once the message is announced
  bool copied = false;   ///< a send that was finished before it had a link; `copy` holds its bytes
  Bytes copy;
  size_t pending_index = 0;  ///< index in the engine's list of pending operations

  /// Example: "receive from rank 3 with tag 7 (float32[12])".
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
