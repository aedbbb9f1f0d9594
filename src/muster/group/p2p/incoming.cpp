#include "muster/group/p2p/incoming.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace muster {
void IncomingMessages::handle(const MessageHeader& header) {
  switch (header.kind) {
    case MessageKind::kEager:
      return on_eager(header);
    case MessageKind::kOffer:
      return on_request_to_send(header);
    case MessageKind::kData:
      return on_data(header);
    default:
      return reject("it answers where nothing was offered");
  }
}

// ---- short messages

void IncomingMessages::on_eager(const MessageHeader& header) {
  const size_t cost = header.bytes + kMessageHeaderBytes;
  if (cost > kEagerWindow - out_) return reject("it sends more than its window");
  out_ += cost;
  const auto message = std::make_shared<UnexpectedMessage>(UnexpectedMessage{this, header, {}, false, nullptr});
  const MessagePtr receive = matcher_.arrive(peer(), header.tag, message);
  if (!receive) return begin_keeping(message);
  used(header);
  if (!suits(header, receive)) return skip(header.bytes);
  receive->matched = true;
  receive->source = peer();
  read_payload(segments_of<Segment>(receive->data, 0, header.bytes), [this, receive] {
    delegate_.finish(receive, {});
    read_header();
  });
}

void IncomingMessages::begin_keeping(const UnexpectedPtr& message) {
  message->payload.resize(message->header.bytes);
  const Segment into{message->payload.data(), message->payload.size()};
  read_payload({&into, 1}, [this, message] {
    message->whole = true;
    if (const MessagePtr receive = std::exchange(message->claimed, nullptr)) deliver(*message, receive);
    read_header();
  });
}

void IncomingMessages::skip(size_t bytes) {
  const auto waste = std::make_shared<Bytes>(bytes);
  const Segment into{waste->data(), waste->size()};
  read_payload({&into, 1}, [this, waste] { read_header(); });
}

void IncomingMessages::deliver(UnexpectedMessage& message, const MessagePtr& receive) {
  receive->source = peer();
  if (message.header.kind == MessageKind::kOffer) return accept(message.header, receive);
  if (!message.whole) {
    receive->matched = true;
    message.claimed = receive;
    return;
  }
  used(message.header);
  if (!suits(message.header, receive)) return;
  receive->data.write(0, message.payload.data(), message.payload.size());
  delegate_.finish(receive, {});
}

/// Whether the message has the length and the dtype of the receive; else the receive ends.
bool IncomingMessages::suits(const MessageHeader& header, const MessagePtr& receive) {
  const bool as_long = header.bytes == receive->data.bytes();
  if (as_long && header.dtype == receive->data.dtype()) return true;
  receive->source = peer();
  const std::string what = as_long ? fmt::format("rank {} sent {} with tag {}, the receive takes {}", peer(),
                                                 name(header.dtype), header.tag, name(receive->data.dtype()))
                                   : fmt::format("rank {} sent {} bytes with tag {}, the receive takes {}", peer(),
                                                 header.bytes, header.tag, receive->data.bytes());
  delegate_.finish(receive, fail(ErrorCode::kMismatch, what, peer()));
  return false;
}

// ---- long ones

void IncomingMessages::on_request_to_send(const MessageHeader& header) {
  if (header.id != last_id_ + 1) return reject("it offers messages out of order");
  if (++offers_ > kMaxRequests) return reject("it offers too many messages");
  last_id_ = header.id;
  const auto message = std::make_shared<UnexpectedMessage>(UnexpectedMessage{this, header, {}, false, nullptr});
  if (const MessagePtr receive = matcher_.arrive(peer(), header.tag, message)) deliver(*message, receive);
  read_header();
}

void IncomingMessages::accept(const MessageHeader& offer, const MessagePtr& receive) {
  if (!suits(offer, receive)) {
    --offers_;
    return write({MessageKind::kRefuse, 0, offer.id, receive->data.bytes(), take_credit(), receive->data.dtype()});
  }
  if (offer.bytes == 0) {
    --offers_;
    delegate_.finish(receive, {});
  } else {
    receive->matched = true;
    receive->id = offer.id;
    accepted_.emplace(offer.id, receive);
  }
  write({MessageKind::kAccept, 0, offer.id, 0, take_credit()});
}

void IncomingMessages::on_data(const MessageHeader& header) {
  const auto found = accepted_.find(header.id);
  if (found == accepted_.end()) return reject("it sends a message that was not accepted");
  const MessagePtr receive = found->second;
  if (header.bytes > receive->data.bytes() - receive->moved) return reject("a message is longer than it said");
  const auto into = segments_of<Segment>(receive->data, receive->moved, header.bytes);
  receive->moved += header.bytes;
  read_payload(into, [this, receive] {
    if (receive->moved == receive->data.bytes()) {
      accepted_.erase(receive->id);
      --offers_;
      delegate_.finish(receive, {});
    }
    read_header();
  });
}

/// What is given back with the next words to the sender.
uint64_t IncomingMessages::take_credit() {
  out_ -= credit_owed_;
  return std::exchange(credit_owed_, 0);
}

}  // namespace muster
