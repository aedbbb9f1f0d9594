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

/// Messages between two ranks that are announced and not yet taken: more are refused at both ends.
inline constexpr size_t kMaxRequests = 1 << 16;

/// What channels ask of the P2P engine that owns them.
class P2pDelegate {
 public:
  virtual void finish(const MessagePtr& operation, Result<> result) = 0;
  /// The channel's link has ended, and everything that came before was read.
  virtual void ended(MessageChannel& channel, const Error& why) = 0;
  /// So many more (or fewer) messages count as sent and have yet to be written.
  virtual void copied(int change) = 0;

 protected:
  ~P2pDelegate() = default;
};

/// One end of a link that carries the messages of one rank to another (messenger_wire.cpp). Not thread-safe: used under
/// the P2P engine's lock by whoever drives its loop.
class MessageChannel {
 public:
  virtual ~MessageChannel() = default;
  MessageChannel(const MessageChannel&) = delete;
  MessageChannel& operator=(const MessageChannel&) = delete;

  Rank peer() const { return peer_; }
  bool is_open() const { return link_ && link_->is_open(); }
  const Link& link() const { return *link_; }
  void close(const Error& why);

 protected:
  MessageChannel(P2pDelegate& delegate, Rank peer) : delegate_(delegate), peer_(peer) {}

  void begin(std::unique_ptr<Link> link);
  /// A header, and behind it the given stretches, which stay where they are until `written`. After the link has ended
  /// nothing is called any more.
  void write(const MessageHeader& header, std::span<const ConstSegment> payload = {},
             std::function<void()> written = nullptr);
  /// To be called once the one before was dealt with: calls handle().
  void read_header();
  void read_payload(std::span<const Segment> into, std::function<void()> then);
  virtual void handle(const MessageHeader& header) = 0;
  /// The peer does not keep to the protocol.
  void reject(const std::string& what);

  P2pDelegate& delegate_;

 private:
  /// A header must stay where it is until it has gone.
  struct Frame {
    std::array<uint8_t, kMessageHeaderBytes> header;
    std::function<void()> written;
  };

  void end(const Error& why);

  const Rank peer_;
  std::unique_ptr<Link> link_;
  Fifo<std::unique_ptr<Frame>> frames_;
  std::vector<ConstSegment> segments_;
  std::array<uint8_t, kMessageHeaderBytes> header_{};
  std::function<void()> then_;  ///< after the payload that is being read
  bool ended_ = false;
};

}  // namespace muster
