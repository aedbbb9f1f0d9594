#include "muster/transport/link_base.h"

#include "muster/base/check.h"

namespace muster {

void LinkBase::send(std::span<const ConstSegment> from, Completion completion) {
  if (draining_ && is_open()) end(*draining_);
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
  run_completions();
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
  run_completions();
}

void LinkBase::close(Error why) {
  if (is_open()) {
    shutdown(&why);
    ended_ = std::move(why);
    fail_pending();
  }
  run_completions();
}

void LinkBase::on_close(std::function<void(const Error&)> handler) {
  close_handler_ = std::move(handler);
  if (!is_open()) {
    fail_pending();
    run_completions();
  }
}

void LinkBase::ping(std::function<void()> pong) {
  if (!is_open()) return;
  pongs_.push(std::move(pong));
  send_ping();
  run_completions();
}

void LinkBase::on_pong() {
  if (pongs_.empty()) return;
  completions_.push([pong = pongs_.pop()](Result<>) { pong(); }, {});
}

void LinkBase::send_control(ByteView bytes) {
  MUSTER_CHECK(!bytes.empty() && bytes.size() <= kMaxControlMessage, "a note has some bytes, and not too many");
  if (!is_open()) return;
  write_control(bytes);
  run_completions();
}

void LinkBase::deliver_control(ByteView message) {
  completions_.push(
      [this, copy = Bytes(message.begin(), message.end())](Result<>) {
        if (control_handler_) control_handler_(copy);
      },
      {});
}

void LinkBase::end(Error why) {
  if (!is_open()) return;
  ended_ = std::move(why);
  release();
  fail_pending();
}

void LinkBase::begin_drain(Error why) {
  if (!draining_) draining_ = std::move(why);
}

void LinkBase::run_completions() {
  if (draining_ && is_open() && (sending() || !has_unread())) end(*draining_);
  completions_.run();
}

void LinkBase::destroy_pending() {
  close_handler_ = nullptr;
  control_handler_ = nullptr;
  if (is_open()) {
    shutdown(nullptr);
    ended_ = Error{ErrorCode::kAborted, "the link to " + peer_.to_string() + " was closed here", kNoRank, {}};
    fail_pending();
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

void LinkBase::fail_pending() {
  fail_all(sends_);
  fail_all(receives_);
  if (close_handler_) {
    completions_.push([handler = std::exchange(close_handler_, nullptr), why = *ended_](Result<>) { handler(why); },
                      {});
  }
}

Error shutdown_error(const Peer& peer) {
  return Error{ErrorCode::kAborted, peer.to_string() + " closed its link", peer.rank, {}};
}

}  // namespace muster
