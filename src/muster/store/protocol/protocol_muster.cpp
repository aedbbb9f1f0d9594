// Muster's own protocol: frames as in messages.cpp. Requests go to the server, replies to the client.

#include "muster/store/protocol/messages.h"
#include "muster/store/protocol/protocol.h"

namespace muster {
namespace {

class MusterProtocol : public Protocol {
 public:
  void feed(ByteView bytes) override { parser_.feed(bytes); }

  Result<std::optional<Request>> next(Bytes&) override {
    MUSTER_ASSIGN(const auto frame, parser_.next());
    if (!frame) return std::nullopt;
    MUSTER_ASSIGN(Request request, decode_request(frame->header, frame->payload));
    return request;
  }

  Result<> encode(const Reply& reply, Bytes& out) override {
    const Bytes frame = encode_reply(reply);
    out.insert(out.end(), frame.begin(), frame.end());
    return {};
  }

 private:
  FrameParser parser_{kMaxMessageBytes};
};

}  // namespace

std::unique_ptr<Protocol> muster_protocol() { return std::make_unique<MusterProtocol>(); }

}  // namespace muster
