#pragma once

#include <unordered_map>

#include "muster/group/p2p/channel.h"

namespace muster {

/// This rank's messages to one other rank. Short messages are sent at once (eagerly), within a window of credits that
/// the receiver gives back. A longer message is announced with a request to send (RTS), and so is a short one without
/// credit. The receiver answers clear to send (CTS) or reject.
class OutgoingMessages final : public MessageChannel {
 public:
  OutgoingMessages(P2pEngine& engine, Rank to) : MessageChannel(engine, to) {}
  ~OutgoingMessages() override { drop_copies(); }

  /// Without a link, short messages within the window are copied and count as sent. Other messages wait for the link.
  void send(const MessagePtr& operation);
  void open(Link& link);
  /// The peer has left and receives nothing any more: detaches the channel and drops all messages.
  void abandon();

 private:
  void drop_copies();
  void start(const MessagePtr& operation);
  void send_eagerly(const MessagePtr& operation);
  void handle(const MessageHeader& header) override;
  void on_clear_to_send(const MessagePtr& operation);
  void on_reject(const MessagePtr& operation, const MessageHeader& wanted);
  void send_next_piece();

  size_t window_ = kEagerWindow;
  uint64_t last_id_ = 0;
  int copies_ = 0;                                      ///< copied messages that are not written yet
  Fifo<MessagePtr> waiting_;                            ///< messages that wait for the link
  std::unordered_map<uint64_t, MessagePtr> announced_;  ///< by id
  Fifo<MessagePtr> cleared_;  ///< messages that are cleared to send; the first one is being sent
};

}  // namespace muster
