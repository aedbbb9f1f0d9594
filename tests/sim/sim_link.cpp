#include "sim/sim_link.h"

#include <algorithm>

namespace muster::sim {
namespace {

Peer simulated_peer(Rank rank) { return Peer{rank, "sim", 1000 + rank}; }

}  // namespace

SimLink::SimLink(World& world, uint32_t number, Rank self, Rank peer)
    : LinkBase(simulated_peer(peer)), world_(&world), number_(number), self_(self) {}

SimLink::~SimLink() {
  destroy_link();
  if (other_ != nullptr) other_->other_ = nullptr;
  if (world_ != nullptr) world_->links_[number_] = nullptr;
}

void SimLink::pump_sends() {
  if (world_ == nullptr || crashed_) return;
  while (sending()) {
    Transfer& transfer = sends_.front();
    const size_t room = other_ == nullptr ? kMaxPacket : kWindow - other_->unreceived_;
    size_t bytes = std::min({transfer.remaining(), room, kMaxPacket});
    if (bytes == 0) return;
    if (bytes > 1 && world_->random_.chance(world_->faults_.short_read)) {
      bytes = world_->random_.between(1, bytes - 1);
    }
    Packet packet{Bytes(bytes), 0, nullptr};
    transfer.copy_to(packet.bytes.data(), bytes);
    world_->bytes_sent_[self_] += bytes;
    dispatch(std::move(packet));
    complete_done(sends_);
  }
}

void SimLink::dispatch(Packet packet) {
  if (world_ == nullptr || other_ == nullptr) return;
  const double seconds = static_cast<double>(packet.bytes.size()) / world_->faults_.bytes_per_second;
  line_free_ = std::max(world_->now(), line_free_) + Duration(static_cast<int64_t>(seconds * 1e9));
  last_arrival_ = std::max(last_arrival_, line_free_ + world_->packet_delay());
  world_->schedule(last_arrival_, World::Kind::kArrive, other_->number_);
  other_->unreceived_ += packet.bytes.size();
  other_->incoming_.push(std::move(packet));
}

void SimLink::pump_receives() {
  bool freed = false;
  while (receiving() && has_unread()) {
    Packet& packet = incoming_.front();
    const size_t bytes = std::min(receives_.front().remaining(), packet.bytes.size() - packet.taken);
    receives_.front().copy_from(packet.bytes.data() + packet.taken, bytes);
    packet.taken += bytes;
    unreceived_ -= bytes;
    freed = true;
    complete_done(receives_);
    if (packet.taken == packet.bytes.size()) {
      incoming_.pop();
      --arrived_;
    }
  }
  if (!freed || window_update_pending_ || world_ == nullptr || other_ == nullptr || !other_->sending()) return;
  window_update_pending_ = true;
  world_->schedule(world_->now() + world_->random_delay(), World::Kind::kWindowUpdate, other_->number_);
}

void SimLink::on_event(World::Kind kind) {
  if (kind == World::Kind::kArrive) return on_arrival();
  if (kind == World::Kind::kWindowUpdate) return on_window_update();
  if (crashed_ || !is_open()) return;
  if (kind == World::Kind::kControl) {
    deliver_control(controls_.pop());
  } else {
    if (kind == World::Kind::kPing) signal(World::Kind::kPong);
    on_pong();
  }
  run_completions();
}

void SimLink::write_control(ByteView message) {
  if (world_ == nullptr || other_ == nullptr) return;
  other_->controls_.push(Bytes(message.begin(), message.end()));
  signal(World::Kind::kControl);
}

void SimLink::signal(World::Kind kind) {
  if (world_ == nullptr || other_ == nullptr) return;
  world_->schedule(world_->now() + world_->random_delay(), kind, other_->number_);
}

void SimLink::on_arrival() {
  if (crashed_) return;
  ++arrived_;
  if (const Error* why = incoming_.back().close_reason.get(); why != nullptr && arrived_ == incoming_.size()) {
    Error reported = *why;
    reported.reported_by = peer().rank;
    begin_drain(std::move(reported));
  }
  pump_receives();
  run_completions();
}

void SimLink::on_window_update() {
  if (other_ != nullptr) other_->window_update_pending_ = false;
  if (crashed_ || !is_open()) return;
  pump_sends();
  run_completions();
}

void SimLink::on_peer_lost(const char* how) {
  if (crashed_) return;
  begin_drain(Error{ErrorCode::kPeerLost, peer().to_string() + " " + how, peer().rank, {}});
  run_completions();
}

void SimLink::crash() {
  crashed_ = true;
  mute();
}

void SimLink::shutdown(const Error* why) {
  if (crashed_) return;
  dispatch(Packet{{}, 0, std::make_unique<Error>(why != nullptr ? *why : shutdown_error(simulated_peer(self_)))});
}

}  // namespace muster::sim
