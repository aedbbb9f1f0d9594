#include "muster/transport/link_base.h"

#include <fmt/format.h>

#include "muster/base/check.h"

namespace muster {

std::string Peer::to_string() const { return fmt::format("rank {} (host {}, pid {})", rank, host, pid); }

void LinkState::on_close(std::function<void(const Error&)> handler) {
  close_handler_ = std::move(handler);
  if (is_open()) return;
  set_ended(*ended_);
  completions_.run();
}

void LinkState::set_ended(Error why) {
  ended_ = std::move(why);
  fail_operations();
  if (!close_handler_) return;
  completions_.push([handler = std::exchange(close_handler_, nullptr), error = *ended_](Result<>) { handler(error); },
                    {});
}

void LinkState::deliver_control(ByteView message) {
  completions_.push(
      [this, copy = Bytes(message.begin(), message.end())](Result<>) {
        if (control_handler_) control_handler_(copy);
      },
      {});
}

void LinkState::destroy_pending() {
  close_handler_ = nullptr;
  control_handler_ = nullptr;
  if (is_open()) {
    set_ended({ErrorCode::kAborted, "the link to " + peer_.to_string() + " was closed here", kNoRank, {}});
  }
  completions_.drain();
}

void LinkBase::send(std::span<const ConstSegment> from, Completion completion) {
  if (draining_ && is_open()) end(*draining_);
  if (start(sends_, Transfer(from, std::move(completion)))) pump_sends();
  run_completions();
}

void LinkBase::receive(std::span<const Segment> into, Completion completion) {
  if (start(receives_, Transfer(into, std::move(completion)))) pump_receives();
  run_completions();
}

/// Queues the operation. True if it is the first, so that its bytes can be moved now.
bool LinkBase::start(Fifo<Transfer>& operations, Transfer&& transfer) {
  if (!is_open()) {
    completions_.push(transfer.take_completion(), tl::unexpected(*ended_));
    return false;
  }
  const bool first = operations.empty();
  if (first && transfer.remaining() == 0) {
    completions_.push(transfer.take_completion(), {});
    return false;
  }
  operations.push(std::move(transfer));
  return first;
}

void LinkBase::close(Error why) {
  if (is_open()) {
    shutdown(&why);
    set_ended(std::move(why));
  }
  run_completions();
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
  MUSTER_CHECK(!bytes.empty() && bytes.size() <= kMaxControlMessage, "a control message has 1 to 64 bytes");
  if (!is_open()) return;
  write_control(bytes);
  run_completions();
}

void LinkBase::end(Error why) {
  if (!is_open()) return;
  release();
  set_ended(std::move(why));
}

void LinkBase::begin_drain(Error why) {
  if (!draining_) draining_ = std::move(why);
}

void LinkBase::run_completions() {
  if (draining_ && is_open() && (sending() || !has_unread())) end(*draining_);
  completions_.run();
}

void LinkBase::destroy_link() {
  if (is_open()) shutdown(nullptr);
  destroy_pending();
}

void LinkBase::complete_done(Fifo<Transfer>& operations) {
  while (!operations.empty() && operations.front().remaining() == 0) {
    completions_.push(operations.pop().take_completion(), {});
  }
}

void LinkBase::fail_operations() {
  for (Fifo<Transfer>* operations : {&sends_, &receives_}) {
    while (!operations->empty()) completions_.push(operations->pop().take_completion(), tl::unexpected(*ended_));
  }
}

Error shutdown_error(const Peer& peer) {
  return Error{ErrorCode::kAborted, peer.to_string() + " closed its link", peer.rank, {}};
}

}  // namespace muster
