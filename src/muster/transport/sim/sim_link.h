#pragma once

#include "muster/base/bytes.h"
#include "muster/transport/link_base.h"
#include "muster/transport/sim/network.h"

namespace muster::sim {

/// One end of a simulated link. It holds what is on the way to it, so that bytes outlive the end that sent them.
class SimLink final : public LinkBase {
 public:
  SimLink(Network& network, uint32_t number, Rank self, Rank peer);
  ~SimLink() override;
  const char* kind() const override { return "sim"; }

  void join(SimLink* other) { other_ = other; }
  void detach() { network_ = nullptr; }
  Rank self() const { return self_; }
  uint32_t number() const { return number_; }
  SimLink* other() const { return other_; }

  // What the network tells it.
  void on_event(Network::Kind kind);
  void on_peer_lost(const char* how);
  void crash();

 private:
  struct Packet {
    Bytes bytes;
    size_t taken = 0;
    std::unique_ptr<Error> close_reason;  // the last parcel: why the sender closed
  };
  /// A sender may be this far ahead of its receiver, as with a kernel's buffers.
  static constexpr size_t kWindow = size_t{1} << 20;
  static constexpr size_t kMaxPacket = size_t{256} << 10;

  void pump_sends() override;
  void pump_receives() override;
  bool has_unread() const override { return arrived_ > 0 && !incoming_.front().close_reason; }
  void shutdown(const Error* why) override;
  void release() override {}
  void send_ping() override { signal(Network::Kind::kPing); }
  void write_control(ByteView message) override;
  void signal(Network::Kind kind);
  void on_arrival();
  void on_window_update();
  void dispatch(Packet packet);

  Network* network_;  // null once the world is gone
  uint32_t number_;
  Rank self_;
  SimLink* other_ = nullptr;  // null once destroyed
  bool crashed_ = false;

  Fifo<Packet> incoming_;
  Fifo<Bytes> controls_;
  size_t arrived_ = 0;                  // how many of the parcels are here already
  size_t unreceived_ = 0;               // bytes sent to this end that it has not taken
  bool window_update_pending_ = false;  // the other end is about to learn that there is room
  TimePoint line_free_;                 // when the line from here to the other end has carried what was sent
  TimePoint last_arrival_;              // of what was sent from here
};

}  // namespace muster::sim
