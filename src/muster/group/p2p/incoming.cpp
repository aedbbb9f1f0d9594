#include "muster/group/p2p/incoming.h"

#include <fmt/format.h>

#include <utility>

#include "muster/group/p2p/p2p_engine.h"

namespace muster {

void IncomingMessages::handle(const MessageHeader& header) {
  switch (header.kind) {
    case MessageKind::kEager:
      return on_eager(header);
    case MessageKind::kRequestToSend:
      return on_request_to_send(header);
    case MessageKind::kData:
      return on_data(header);
    default:
      return reject("it answers a message that was not announced");
  }
}

// ---- short messages

void IncomingMessages::on_eager(const MessageHeader& header) {
  const size_t cost = header.bytes + kMessageHeaderBytes;
  if (cost > kEagerWindow - window_used_) return reject("it sends more than its window");
  window_used_ += cost;
  const auto message = std::make_shared<UnexpectedMessage>(UnexpectedMessage{this, header, {}, false, nullptr});
  const MessagePtr receive = matcher_.arrive(peer(), header.tag, message);
  if (!receive) return keep(message);
  release_credit(header);
  if (!matches(header, receive)) return discard(header.bytes);
  receive->matched = true;
  receive->source = peer();
  read_payload(segments_of<Segment>(receive->data, 0, header.bytes), [this, receive] {
    engine_.finish(receive, {});
    read_header();
  });
}

void IncomingMessages::keep(const UnexpectedPtr& message) {
  message->payload.resize(message->header.bytes);
  const Segment into{message->payload.data(), message->payload.size()};
  read_payload({&into, 1}, [this, message] {
    message->complete = true;
    if (const MessagePtr receive = std::exchange(message->receive, nullptr)) deliver(*message, receive);
    read_header();
  });
}

void IncomingMessages::discard(size_t bytes) {
  const auto room = std::make_shared<Bytes>(bytes);
  const Segment into{room->data(), room->size()};
  read_payload({&into, 1}, [this, room] { read_header(); });
}

void IncomingMessages::deliver(UnexpectedMessage& message, const MessagePtr& receive) {
  receive->source = peer();
  if (message.header.kind == MessageKind::kRequestToSend) return answer(message.header, receive);
  if (!message.complete) {
    receive->matched = true;
    message.receive = receive;
    return;
  }
  release_credit(message.header);
  if (!matches(message.header, receive)) return;
  receive->data.write(0, message.payload.data(), message.payload.size());
  engine_.finish(receive, {});
}

/// Returns true if the message has the length and the dtype of the receive. Otherwise fails the receive.
bool IncomingMessages::matches(const MessageHeader& header, const MessagePtr& receive) {
  const bool same_length = header.bytes == receive->data.bytes();
  if (same_length && header.dtype == receive->data.dtype()) return true;
  receive->source = peer();
  const std::string what = same_length ? fmt::format("rank {} sent {} with tag {}, the receive takes {}", peer(),
                                                     name(header.dtype), header.tag, name(receive->data.dtype()))
                                       : fmt::format("rank {} sent {} bytes with tag {}, the receive takes {}", peer(),
                                                     header.bytes, header.tag, receive->data.bytes());
  engine_.finish(receive, fail(ErrorCode::kMismatch, what, peer()));
  return false;
}

// ---- long messages

void IncomingMessages::on_request_to_send(const MessageHeader& header) {
  if (header.id != last_id_ + 1) return reject("it announces messages out of order");
  if (++requests_ > kMaxRequests) return reject("it announces too many messages");
  last_id_ = header.id;
  const auto message = std::make_shared<UnexpectedMessage>(UnexpectedMessage{this, header, {}, false, nullptr});
  if (const MessagePtr receive = matcher_.arrive(peer(), header.tag, message)) deliver(*message, receive);
  read_header();
}

void IncomingMessages::answer(const MessageHeader& request, const MessagePtr& receive) {
  if (!matches(request, receive)) {
    --requests_;
    return write({.kind = MessageKind::kReject,
                  .dtype = receive->data.dtype(),
                  .id = request.id,
                  .bytes = receive->data.bytes(),
                  .credit = take_credit()});
  }
  if (request.bytes == 0) {
    --requests_;
    engine_.finish(receive, {});
  } else {
    receive->matched = true;
    receive->id = request.id;
    cleared_.emplace(request.id, receive);
  }
  write({.kind = MessageKind::kClearToSend, .id = request.id, .credit = take_credit()});
}

void IncomingMessages::on_data(const MessageHeader& header) {
  const auto found = cleared_.find(header.id);
  if (found == cleared_.end()) return reject("it sends a message that was not cleared to send");
  const MessagePtr receive = found->second;
  if (header.bytes > receive->data.bytes() - receive->moved) return reject("a message is longer than announced");
  const auto into = segments_of<Segment>(receive->data, receive->moved, header.bytes);
  receive->moved += header.bytes;
  read_payload(into, [this, receive] {
    if (receive->moved == receive->data.bytes()) {
      cleared_.erase(receive->id);
      --requests_;
      engine_.finish(receive, {});
    }
    read_header();
  });
}

/// Takes the credit that the next answer gives back to the sender.
uint64_t IncomingMessages::take_credit() {
  window_used_ -= credit_owed_;
  return std::exchange(credit_owed_, 0);
}

}  // namespace muster
