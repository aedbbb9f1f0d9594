#pragma once

#include <unordered_map>

#include "muster/group/p2p/channel.h"

namespace muster {

/// This rank's messages to one other.
class OutgoingMessages final : public MessageChannel {
 public:
  OutgoingMessages(P2pDelegate& delegate, Rank to) : MessageChannel(delegate, to) {}
  ~OutgoingMessages() override { drop_copies(); }

  /// Without a link, short messages are copied and count as sent, as far as the window goes; the others wait.
  void send(const MessagePtr& operation);
  void open(std::unique_ptr<Link> link);
  /// The peer takes nothing any more: closes the link, which holds the memory of sends until then, and forgets what
  /// waits for it.
  void abandon(const Error& why);

 private:
  void drop_copies();
  void launch(const MessagePtr& operation);
  void launch_eager(const MessagePtr& operation);
  void handle(const MessageHeader& header) override;
  void accepted(const MessagePtr& operation);
  void refused(const MessagePtr& operation, const MessageHeader& wanted);
  void stream();

  size_t window_ = kEagerWindow;
  uint64_t last_id_ = 0;
  int copies_ = 0;                                    ///< not yet written
  Fifo<MessagePtr> waiting_;                          ///< for the link
  std::unordered_map<uint64_t, MessagePtr> offered_;  ///< by id
  Fifo<MessagePtr> accepted_;                         ///< the first one's bytes are under way
};

}  // namespace muster
