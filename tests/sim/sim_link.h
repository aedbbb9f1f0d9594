#pragma once

#include "muster/base/bytes.h"
#include "muster/transport/link_base.h"
#include "sim/sim_world.h"

namespace muster::sim {

/// One end of a simulated link. It holds the packets on their way to it, so that they outlive their sender.
class SimLink final : public LinkBase {
 public:
  SimLink(World& world, uint32_t number, Rank self, Rank peer);
  ~SimLink() override;
  const char* kind() const override { return "sim"; }

  void join(SimLink* other) { other_ = other; }
  Rank self() const { return self_; }
  uint32_t number() const { return number_; }
  SimLink* other() const { return other_; }

  // Called by World.
  void on_event(World::Kind kind);
  void on_peer_lost(const char* how);
  void crash();

 private:
  friend class World;
  struct Packet {
    Bytes bytes;
    size_t taken = 0;
    std::unique_ptr<Error> close_reason;  // in the last packet: why the sender closed
  };
  /// The most bytes that a sender may be ahead of its receiver, like the socket buffers of a kernel.
  static constexpr size_t kWindow = size_t{1} << 20;
  static constexpr size_t kMaxPacket = size_t{256} << 10;

  void pump_sends() override;
  void pump_receives() override;
  bool has_unread() const override { return arrived_ > 0 && !incoming_.front().close_reason; }
  void shutdown(const Error* why) override;
  void release() override {}
  void send_ping() override { signal(World::Kind::kPing); }
  void write_control(ByteView message) override;
  void signal(World::Kind kind);
  void on_arrival();
  void on_window_update();
  void dispatch(Packet packet);

  World* world_;  // null after the world was destroyed
  uint32_t number_;
  Rank self_;
  SimLink* other_ = nullptr;  // null after it was destroyed
  bool crashed_ = false;

  Fifo<Packet> incoming_;
  Fifo<Bytes> controls_;
  size_t arrived_ = 0;                  // packets that have arrived
  size_t unreceived_ = 0;               // bytes that were sent to this end and not received
  bool window_update_pending_ = false;  // an update to the other end is scheduled
  TimePoint line_free_;                 // when all bytes sent so far have left
  TimePoint last_arrival_;              // of the packets sent from this end
};

}  // namespace muster::sim
