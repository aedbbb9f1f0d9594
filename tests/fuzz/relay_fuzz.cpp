// The frames of RPC over a process group. The input is the headers of the frames that the other rank sends; the bytes
// behind them are made up. A worker that accepts no connection stands behind the relay. Whatever comes, the relay ends.
#include <unistd.h>

#include <cstring>
#include <utility>
#include <vector>

#include "muster/base/check.h"
#include "muster/io/socket.h"
#include "muster/torch/rpc/process_group_frames.h"
#include "muster/torch/rpc/process_group_relay.h"

namespace muster::rpc {
namespace {

class Done final : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds) override { return true; }
};

/// Rank 0 of 2. Rank 1 sends the frames, then its last one. What is sent to it is dropped.
class Peer final : public c10d::Backend {
 public:
  explicit Peer(ByteView headers) : Backend(0, 2), headers_(headers) {}
  const std::string getBackendName() const override { return "fuzz"; }

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>&, int, int) override { return done(); }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int, int) override {
    at::Tensor& into = tensors.front().fill_(7);
    if (std::exchange(in_frame_, false)) return done();
    FrameHeader header{.kind = FrameKind::kBye};
    if (headers_.size() >= sizeof header) {
      std::memcpy(&header, headers_.data(), sizeof header);
      headers_ = headers_.subspan(sizeof header);
    }
    std::memcpy(into.data_ptr(), &header, sizeof header);
    in_frame_ = header.bytes > kInlineBytes && header.bytes <= kMaxChunk;
    return done();
  }

 private:
  static c10::intrusive_ptr<c10d::Work> done() { return c10::make_intrusive<Done>(); }

  ByteView headers_;
  bool in_frame_ = false;  ///< the second message of a frame comes next
};

void relay_frames(ByteView headers) {
  const Fd worker = listen_on(Address::parse("unix:@muster-relay-fuzz-" + std::to_string(getpid())).value()).value();
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(0, 2);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, c10::make_intrusive<Peer>(headers));
  const auto relay = relay_over(group).value();
  MUSTER_CHECK(relay->publish(local_address(worker.get()).value()) == "rank:0", "the relay has another address");
  MUSTER_CHECK(relay->route("rank:1").has_value(), "no way to the other rank");
}

}  // namespace
}  // namespace muster::rpc

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  muster::rpc::relay_frames({data, size});
  return 0;
}
