#include "muster/transport/link_base.h"

#include "muster/base/check.h"

namespace muster {

void LinkBase::send(std::span<const ConstSegment> from, Completion completion) {
  if (parting_ && is_open()) end(*parting_);
  Transfer transfer(from, std::move(completion));
  if (!is_open()) {
    completions_.push(transfer.take_completion(), tl::unexpected(*ended_));
  } else if (sending()) {
    sends_.push(std::move(transfer));  // the transport is full, or it would have taken the one before
  } else if (transfer.remaining() == 0) {
    completions_.push(transfer.take_completion(), {});
  } else {
    sends_.push(std::move(transfer));
    pump_sends();
  }
  settle();
}

void LinkBase::receive(std::span<const Segment> into, Completion completion) {
  Transfer transfer(into, std::move(completion));
  if (!is_open()) {
    completions_.push(transfer.take_completion(), tl::unexpected(*ended_));
  } else if (receiving()) {
    receives_.push(std::move(transfer));
  } else if (transfer.remaining() == 0) {
    completions_.push(transfer.take_completion(), {});
  } else {
    receives_.push(std::move(transfer));
    pump_receives();
  }
  settle();
}

void LinkBase::close(Error why) {
  if (is_open()) {
    leave(&why);
    ended_ = std::move(why);
    tell_ended();
  }
  settle();
}

void LinkBase::on_close(std::function<void(const Error&)> handler) {
  close_handler_ = std::move(handler);
  if (!is_open()) {
    tell_ended();
    settle();
  }
}

void LinkBase::ping(std::function<void()> pong) {
  if (!is_open()) return;
  pongs_.push(std::move(pong));
  ask();
  settle();
}

void LinkBase::answered() {
  if (pongs_.empty()) return;
  completions_.push([pong = pongs_.pop()](Result<>) { pong(); }, {});
}

void LinkBase::note(ByteView bytes) {
  MUSTER_CHECK(!bytes.empty() && bytes.size() <= kLargestNote, "a note has some bytes, and not too many");
  if (!is_open()) return;
  bring(bytes);
  settle();
}

void LinkBase::noted(ByteView note) {
  completions_.push(
      [this, copy = Bytes(note.begin(), note.end())](Result<>) {
        if (note_handler_) note_handler_(copy);
      },
      {});
}

void LinkBase::end(Error why) {
  if (!is_open()) return;
  ended_ = std::move(why);
  release();
  tell_ended();
}

void LinkBase::part(Error why) {
  if (!parting_) parting_ = std::move(why);
}

void LinkBase::settle() {
  if (parting_ && is_open() && (sending() || !has_unread())) end(*parting_);
  completions_.run();
}

void LinkBase::finish() {
  close_handler_ = nullptr;
  note_handler_ = nullptr;
  if (is_open()) {
    leave(nullptr);
    ended_ = Error{ErrorCode::kAborted, "the link to " + peer_.to_string() + " was closed here", kNoRank, {}};
    tell_ended();
  }
  completions_.drain();
}

void LinkBase::complete_done(Fifo<Transfer>& operations) {
  while (!operations.empty() && operations.front().remaining() == 0) {
    completions_.push(operations.pop().take_completion(), {});
  }
}

void LinkBase::fail_all(Fifo<Transfer>& operations) {
  while (!operations.empty()) completions_.push(operations.pop().take_completion(), tl::unexpected(*ended_));
}

void LinkBase::tell_ended() {
  fail_all(sends_);
  fail_all(receives_);
  if (close_handler_) {
    completions_.push([handler = std::exchange(close_handler_, nullptr), why = *ended_](Result<>) { handler(why); },
                      {});
  }
}

Error goodbye_error(const Peer& peer) {
  return Error{ErrorCode::kAborted, peer.to_string() + " closed its link", peer.rank, {}};
}

}  // namespace muster
