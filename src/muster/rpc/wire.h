#pragma once

#include <string_view>

#include "muster/rpc/agent.h"

namespace muster::rpc {

/// The kinds of messages between two agents. The grammar is at the head of wire.cpp. Part of the wire format: append
/// only.
enum class Kind : uint8_t {
  kHello = 1,    ///< first message of a link's dialer: its name and the version of the format
  kRequest = 2,  ///< a call
  kReply = 3,    ///< its result
  kError = 4,    ///< or why there is none
  kCancel = 5,   ///< the caller does not wait for the result any more
  kStarted = 6,  ///< the function has started. A one-way call has no other answer
};

/// Flags of a request.
inline constexpr uint8_t kOneWay = 1;
inline constexpr uint8_t kRetry = 2;  ///< sent before, on a link that broke
inline constexpr uint8_t kAllFlags = kOneWay | kRetry;

inline constexpr uint8_t kWireVersion = 2;
inline constexpr size_t kMaxNameBytes = 1024;
inline constexpr size_t kMaxSegments = 1 << 16;
/// The most bytes of a batch, and so the most memory that a receiver allocates for small messages of one peer.
inline constexpr size_t kMaxBatchBytes = size_t{1} << 20;
/// A part of a message that is longer than this follows the batch, and is received into memory of its own.
inline constexpr size_t kMaxInlineBytes = size_t{16} << 10;
/// The most inline bytes of one message. Later parts follow the batch.
inline constexpr size_t kMaxInlineSum = size_t{64} << 10;

inline constexpr size_t kBatchHeaderBytes = 8;
inline constexpr size_t kMessageHeaderBytes = 32;

/// The bytes of a header on the wire, because every supported machine is little-endian.
struct MessageHeader {
  Kind kind = Kind::kHello;
  uint8_t flags = 0;
  uint16_t name_bytes = 0;
  uint32_t segments = 0;
  uint64_t id = 0;
  uint64_t timeout_us = 0;  ///< of a request: what is left of the caller's timeout
  uint64_t head_bytes = 0;
};
static_assert(sizeof(MessageHeader) == kMessageHeaderBytes);

/// Decides which parts of a message are inline. Sender and receiver apply the same rule to the same sizes in the same
/// order: first the head, then the segments.
class InlineRule {
 public:
  bool is_inline(size_t bytes) {
    if (bytes > kMaxInlineBytes || sum_ + bytes > kMaxInlineSum) return false;
    sum_ += bytes;
    return true;
  }

 private:
  size_t sum_ = 0;
};

/// Appends messages to a batch.
class BatchWriter {
 public:
  BatchWriter() { clear(); }

  /// Appends the message, and its long parts to `long_parts`. A message with long parts must be the last one of its
  /// batch. Returns false if the batch has no room for it: it must be written and cleared first.
  bool add(MessageHeader header, std::string_view name, const Message& message, std::vector<Buffer>& long_parts);
  bool empty() const { return bytes_.size() == kBatchHeaderBytes; }
  size_t size() const { return bytes_.size(); }
  /// The batch with its header. Starts a new batch in `reuse`.
  Bytes take(Bytes reuse);

 private:
  void clear();
  void put(const void* data, size_t bytes);

  Bytes bytes_;
};

/// A message in a batch. The views point into the batch.
struct ParsedMessage {
  MessageHeader header;
  std::string_view name;
  Message message;                                    ///< inline parts are copied; long parts are empty
  std::vector<std::pair<size_t, size_t>> long_parts;  ///< index of the segment and bytes; index kHeadPart: the head
  static constexpr size_t kHeadPart = SIZE_MAX;
  uint64_t footprint = 0;  ///< Message::footprint(), with the long parts
  TimePoint arrived;       ///< set by the channel: when the batch with the header arrived
};

/// Returns the length of a batch from its header. kProtocol if it is not valid.
Result<size_t> parse_batch_header(ByteView header);
/// Parses the first message of `batch` and removes its bytes. `max_bytes`: of one message. kProtocol for anything that
/// is not a message, or for long parts that are not at the end of the batch.
Result<ParsedMessage> parse_message(ByteView& batch, uint64_t max_bytes);

/// The payload of kError.
Message encode_error(const CallError& error);
Result<CallError> parse_error(const Message& message);

/// kInvalidArgument if a message with this name cannot travel.
Result<> check_message(std::string_view name, const Message& message, uint64_t max_bytes);

}  // namespace muster::rpc
