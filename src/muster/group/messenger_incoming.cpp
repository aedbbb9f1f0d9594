#include "muster/group/messenger_incoming.h"

#include <fmt/format.h>
#include <sys/uio.h>

#include <algorithm>
#include <utility>

namespace muster {
namespace {

/// As many as the sender can have under way (see messenger_outgoing.cpp).
constexpr size_t kMostOffers = 1 << 16;
/// Read from the sender's memory in one turn of the loop: fits a core's cache, and costs some 100 us.
constexpr size_t kCopyBytes = size_t{512} << 10;

}  // namespace

IncomingMessages::~IncomingMessages() {
  if (poller_ != 0) loop_.remove_poller(poller_);
}

void IncomingMessages::handle(const MessageHeader& header) {
  switch (header.kind) {
    case MessageKind::kEager:
      return on_eager(header);
    case MessageKind::kOffer:
      return on_offer(header);
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
    office_.finish(receive, {});
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
  office_.finish(receive, {});
}

/// Whether the message is as long as the receive; else the receive ends.
bool IncomingMessages::suits(const MessageHeader& header, const MessagePtr& receive) {
  if (header.bytes == receive->data.bytes()) return true;
  receive->source = peer();
  office_.finish(receive, fail(ErrorCode::kMismatch,
                               fmt::format("rank {} sent {} bytes with tag {}, the receive takes {}", peer(),
                                           header.bytes, header.tag, receive->data.bytes()),
                               peer()));
  return false;
}

// ---- long ones

void IncomingMessages::on_offer(const MessageHeader& header) {
  if (header.id != last_id_ + 1) return reject("it offers messages out of order");
  if (++offers_ > kMostOffers) return reject("it offers too many messages");
  last_id_ = header.id;
  const auto message = std::make_shared<UnexpectedMessage>(UnexpectedMessage{this, header, {}, false, nullptr});
  if (const MessagePtr receive = matcher_.arrive(peer(), header.tag, message)) deliver(*message, receive);
  read_header();
}

void IncomingMessages::accept(const MessageHeader& offer, const MessagePtr& receive) {
  if (!suits(offer, receive)) {
    --offers_;
    return write({MessageKind::kRefuse, 0, offer.id, receive->data.bytes(), pay()});
  }
  receive->matched = true;
  receive->id = offer.id;
  if (offer.bytes == 0 || (offer.extra != 0 && process_ != 0 && readable_)) {
    copies_.push({receive, offer});
    if (poller_ == 0) poller_ = loop_.add_poller([this] { return copy(); });
    return;
  }
  accepted_.emplace(offer.id, receive);
  write({MessageKind::kAccept, 0, offer.id, 0, pay()});
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
      office_.finish(receive, {});
    }
    read_header();
  });
}

/// What is given back with the next words to the sender.
uint64_t IncomingMessages::pay() {
  out_ -= owed_;
  return std::exchange(owed_, 0);
}

// ---- copies

/// A piece of the first copy; true, as there may be more.
bool IncomingMessages::copy() {
  const auto [receive, offer] = copies_.front();
  if (receive->over || !is_open()) return end_copy(MessageKind::kTaken), true;
  if (receive->moved == offer.bytes) return end_copy(MessageKind::kTaken), true;
  const Segment to = receive->data.at(receive->moved, std::min<size_t>(kCopyBytes, offer.bytes - receive->moved));
  const iovec local{to.data, to.bytes};
  const iovec remote{reinterpret_cast<void*>(static_cast<uintptr_t>(offer.extra + receive->moved)), to.bytes};
  const ssize_t got = process_vm_readv(process_, &local, 1, &remote, 1, 0);
  if (got <= 0) {
    readable_ = false;  // forbidden, as in some containers: then it comes through the link, from its beginning
    end_copy(MessageKind::kAccept);
    return true;
  }
  receive->moved += static_cast<size_t>(got);
  return true;
}

void IncomingMessages::end_copy(MessageKind answer) {
  const Copy done = copies_.pop();
  if (copies_.empty()) loop_.remove_poller(std::exchange(poller_, 0));
  if (done.receive->over || !is_open()) return;
  if (answer == MessageKind::kAccept) {
    done.receive->moved = 0;
    accepted_.emplace(done.offer.id, done.receive);
  } else {
    --offers_;
    office_.finish(done.receive, {});
  }
  write({answer, 0, done.offer.id, 0, pay()});
}

}  // namespace muster
