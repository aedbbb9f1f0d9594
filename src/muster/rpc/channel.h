#pragma once

#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "muster/rpc/wire.h"
#include "muster/transport/fifo.h"
#include "muster/transport/link.h"

namespace muster::rpc {

/// One link between two agents: joins small messages to batches, and reads messages from the peer's batches. Not
/// thread-safe: guarded by the endpoint's lock.
class Channel {
 public:
  /// May be called from within the link's functions.
  struct Events {
    /// The header and the inline parts of a message have arrived. Called before memory for its long parts is allocated.
    /// An error closes the link.
    std::function<Result<>(const ParsedMessage&)> announced;
    /// All of the message has arrived.
    std::function<void(ParsedMessage)> received;
    /// A batch was handed to the transport. Optional.
    std::function<void()> written;
    /// The link has ended. Called once.
    std::function<void(const Error&)> ended;
  };

  /// The link refers to this channel until it is closed or destroyed, which must happen first. A message that is not
  /// valid closes the link with kProtocol. `max_bytes`: of one message.
  Channel(Link& link, uint64_t max_bytes, Events events);
  ~Channel() = default;
  /// Begins to read. Messages that are here already are handled before this returns.
  void start() { read_batch(); }
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  /// Adds a message to the current batch. The segments are kept until they have been written.
  void write(const MessageHeader& header, std::string_view name, const Message& message);
  /// Writes the current batch.
  void flush();
  /// True if the current batch is so long that it should be written now.
  bool is_full() const { return batch_.size() >= kFlushBytes; }
  /// The bytes of batches that were not handed to the transport completely: the peer does not read them.
  size_t unwritten() const { return unwritten_; }
  /// When the last batch, or the last long message, had arrived.
  TimePoint last_read() const { return last_read_; }
  /// True if everything was handed to the transport.
  bool is_idle() const { return batch_.empty() && sent_.empty(); }
  Link& link() { return link_; }
  /// Closes the link. Messages that have arrived are not handled any more, unlike those of a peer that has left.
  void close(const Error& why);

 private:
  static constexpr size_t kFlushBytes = size_t{32} << 10;
  static constexpr size_t kHeadPiece = size_t{4} << 20;

  /// Bytes that the link may still refer to.
  struct Sent {
    Bytes batch;
    std::vector<Buffer> long_parts;
    size_t bytes = 0;
  };
  void read_batch();
  void on_batch_header();
  void handle_messages();
  void receive_head();
  void receive_segments();
  void reject_for_memory();
  void reject(const Error& why);

  Link& link_;
  const uint64_t max_bytes_;
  const Events events_;

  BatchWriter batch_;
  std::vector<Buffer> long_parts_;    ///< of the last message of batch_
  Fifo<std::unique_ptr<Sent>> sent_;  ///< batches that the link has not written completely
  std::unique_ptr<Sent> spare_;       ///< its memory is used again
  size_t unwritten_ = 0;              ///< bytes of sent_
  std::vector<ConstSegment> segments_;

  std::array<uint8_t, kBatchHeaderBytes> header_{};
  Bytes input_;      ///< the batch that is being read
  ByteView unread_;  ///< the part of input_ that was not handled yet
  TimePoint last_read_;
  bool closed_ = false;    ///< by this process
  ParsedMessage partial_;  ///< the message whose long parts are being received
};

}  // namespace muster::rpc
