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

/// Messages from one rank to another that are announced and not received yet: both ends refuse more.
inline constexpr size_t kMaxRequests = 1 << 16;

/// What channels ask of the P2P engine that owns them.
class P2pDelegate {
 public:
  virtual void finish(const MessagePtr& operation, Result<> result) = 0;
  /// `change` more (or fewer) messages count as sent and have yet to be written.
  virtual void on_copied(int change) = 0;

 protected:
  ~P2pDelegate() = default;
};

/// One end of a link that carries the messages of one rank to another (wire.cpp). The link belongs to the engine's link
/// table, which reports its end. Not thread-safe: used under the engine's lock.
class MessageChannel {
 public:
  virtual ~MessageChannel() = default;
  MessageChannel(const MessageChannel&) = delete;
  MessageChannel& operator=(const MessageChannel&) = delete;

  Rank peer() const { return peer_; }
  /// Nothing is read, written or reported any more.
  void detach() { detached_ = true; }

 protected:
  MessageChannel(P2pDelegate& delegate, Rank peer) : delegate_(delegate), peer_(peer) {}

  bool is_open() const { return link_ != nullptr && link_->is_open(); }
  void begin(Link& link);
  /// Writes a header and the payload, which must stay in place until `written`. `written` is not called if the link
  /// ends.
  void write(const MessageHeader& header, std::span<const ConstSegment> payload = {},
             std::function<void()> written = nullptr);
  /// Calls handle() with the next header. To be called once the message before was read.
  void read_header();
  void read_payload(std::span<const Segment> into, std::function<void()> then);
  virtual void handle(const MessageHeader& header) = 0;
  /// Closes the link, because the peer violates the protocol.
  void reject(const std::string& what);

  P2pDelegate& delegate_;

 private:
  /// A header must stay in place until it is written.
  struct Frame {
    std::array<uint8_t, kMessageHeaderBytes> header;
    std::function<void()> written;
  };

  const Rank peer_;
  Link* link_ = nullptr;
  Fifo<std::unique_ptr<Frame>> frames_;
  std::vector<ConstSegment> segments_;
  std::array<uint8_t, kMessageHeaderBytes> header_{};
  std::function<void()> then_;  ///< after the payload that is being read
  bool detached_ = false;
};

}  // namespace muster
