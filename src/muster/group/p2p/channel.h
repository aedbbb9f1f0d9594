#pragma once

#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "muster/group/p2p/message_operation.h"
#include "muster/group/p2p/wire.h"
#include "muster/transport/fifo.h"
#include "muster/transport/link.h"

namespace muster {

class MessageChannel;

/// The maximum number of messages from one rank to another that are announced and not received yet. Both ends refuse
/// more.
inline constexpr size_t kMaxRequests = 1 << 16;

/// The interface of the P2P engine towards its channels. Both functions are called with the engine's lock held.
class P2pDelegate {
 public:
  virtual void finish(const MessagePtr& operation, Result<> result) = 0;
  /// Changes the number of messages that count as sent but are not written to a link yet.
  virtual void on_copied(int change) = 0;

 protected:
  ~P2pDelegate() = default;
};

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
  MessageChannel(P2pDelegate& delegate, Rank peer) : delegate_(delegate), peer_(peer) {}

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

  P2pDelegate& delegate_;

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
