#pragma once

#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "muster/group/p2p/wire.h"
#include "muster/group/work_state.h"
#include "muster/transport/fifo.h"
#include "muster/transport/link.h"

namespace muster {

class P2pEngine;

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

/// The maximum number of messages from one rank to another that are announced and not received yet. Both ends refuse
/// more.
inline constexpr size_t kMaxRequests = 1 << 16;

/// One end of a link that carries the messages of one rank to another (wire.cpp). The engine's link table owns the link
/// and reports when it closes. Not thread-safe: guarded by the engine's lock.
class MessageChannel {
 public:
  virtual ~MessageChannel() = default;
  MessageChannel(const MessageChannel&) = delete;
  MessageChannel& operator=(const MessageChannel&) = delete;

  Rank peer() const { return peer_; }
  /// Stops the channel: it reads, writes and reports nothing any more.
  void detach() { detached_ = true; }

 protected:
  MessageChannel(P2pEngine& engine, Rank peer) : engine_(engine), peer_(peer) {}

  bool is_open() const { return link_ != nullptr && link_->is_open(); }
  void begin(Link& link);
  /// Writes a header and the payload. The payload must stay in place until `written` is called, or until the link ends;
  /// then `written` is not called.
  void write(const MessageHeader& header, std::span<const ConstSegment> payload = {},
             std::function<void()> written = nullptr);
  /// Reads the next header and calls handle() with it. Must be called only after the previous message was read.
  void read_header();
  void read_payload(std::span<const Segment> into, std::function<void()> then);
  virtual void handle(const MessageHeader& header) = 0;
  /// Closes the link, because the peer violates the protocol.
  void reject(const std::string& what);

  P2pEngine& engine_;

 private:
  /// Owns a header until it is written, because the link refers to its memory.
  struct Frame {
    std::array<uint8_t, kMessageHeaderBytes> header;
    std::function<void()> written;
  };

  const Rank peer_;
  Link* link_ = nullptr;
  Fifo<std::unique_ptr<Frame>> frames_;
  std::vector<ConstSegment> segments_;
  std::array<uint8_t, kMessageHeaderBytes> header_{};
  std::function<void()> then_;  ///< called after the current payload was read
  bool detached_ = false;
};

}  // namespace muster
