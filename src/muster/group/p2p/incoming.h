#pragma once

#include <unordered_map>

#include "muster/group/p2p/channel.h"
#include "muster/group/p2p/matcher.h"

namespace muster {

class IncomingMessages;

/// A message that arrived, or was announced, before its receive.
struct UnexpectedMessage {
  IncomingMessages* channel = nullptr;
  MessageHeader header;
  Bytes payload;          ///< of an eager message
  bool complete = false;  ///< the payload has arrived
  MessagePtr receive;     ///< the matched receive, while it waits for the rest of the payload
};
using UnexpectedPtr = std::shared_ptr<UnexpectedMessage>;
using MessageMatcher = Matcher<MessagePtr, UnexpectedPtr>;

/// The messages of one other rank to this rank.
class IncomingMessages final : public MessageChannel {
 public:
  IncomingMessages(P2pEngine& engine, MessageMatcher& matcher, Rank from)
      : MessageChannel(engine, from), matcher_(matcher) {}

  void open(Link& link) { begin(link); }
  /// Gives one of this channel's unexpected messages to its receive.
  void deliver(UnexpectedMessage& message, const MessagePtr& receive);

 private:
  void handle(const MessageHeader& header) override;
  void on_eager(const MessageHeader& header);
  void on_request_to_send(const MessageHeader& header);
  void on_data(const MessageHeader& header);
  void discard(size_t bytes);
  void keep(const UnexpectedPtr& message);
  bool matches(const MessageHeader& header, const MessagePtr& receive);
  void answer(const MessageHeader& request, const MessagePtr& receive);
  void release_credit(const MessageHeader& eager) { credit_owed_ += eager.bytes + kMessageHeaderBytes; }
  uint64_t take_credit();

  MessageMatcher& matcher_;
  size_t window_used_ = 0;  ///< bytes of the sender's window that were not given back yet
  size_t credit_owed_ = 0;  ///< the part of window_used_ that can be given back
  uint64_t last_id_ = 0;
  size_t requests_ = 0;                               ///< announced messages that are not received yet
  std::unordered_map<uint64_t, MessagePtr> cleared_;  ///< receives that were answered with clear to send, by message id
};

}  // namespace muster
