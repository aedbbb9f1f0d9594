#pragma once

#include <unordered_map>

#include "muster/group/p2p/channel.h"
#include "muster/group/p2p/matcher.h"

namespace muster {

class IncomingMessages;

/// A message that came, or was offered, before its receive.
struct UnexpectedMessage {
  IncomingMessages* channel = nullptr;
  MessageHeader header;
  Bytes payload;       ///< of an eager one
  bool whole = false;  ///< the payload is there
  MessagePtr claimed;  ///< by a receive that waits for the rest of the payload
};
using UnexpectedPtr = std::shared_ptr<UnexpectedMessage>;
using MessageMatcher = Matcher<MessagePtr, UnexpectedPtr>;

/// One other rank's messages to this one.
class IncomingMessages final : public MessageChannel {
 public:
  IncomingMessages(P2pDelegate& delegate, MessageMatcher& matcher, Rank from)
      : MessageChannel(delegate, from), matcher_(matcher) {}

  void open(std::unique_ptr<Link> link) { begin(std::move(link)); }
  /// Gives one of this channel's unexpected messages to the receive that takes it.
  void deliver(UnexpectedMessage& message, const MessagePtr& receive);
  /// Whether nothing of the message will come any more, now that the channel has ended.
  static bool is_cut_off(const UnexpectedPtr& message) { return !message->whole; }

 private:
  void handle(const MessageHeader& header) override;
  void on_eager(const MessageHeader& header);
  void on_request_to_send(const MessageHeader& header);
  void on_data(const MessageHeader& header);
  void skip(size_t bytes);
  void begin_keeping(const UnexpectedPtr& message);
  bool suits(const MessageHeader& header, const MessagePtr& receive);
  void accept(const MessageHeader& offer, const MessagePtr& receive);
  void used(const MessageHeader& eager) { credit_owed_ += eager.bytes + kMessageHeaderBytes; }
  uint64_t take_credit();

  MessageMatcher& matcher_;
  size_t out_ = 0;          ///< of the sender's window: what it may not send before it is given back
  size_t credit_owed_ = 0;  ///< of that, what can be given back
  uint64_t last_id_ = 0;
  size_t offers_ = 0;                                  ///< without an answer
  std::unordered_map<uint64_t, MessagePtr> accepted_;  ///< by id
};

}  // namespace muster
