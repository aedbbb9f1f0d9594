// A peer that completes the handshake, opens its link correctly, and then sends arbitrary bytes. The first bytes of the
// input say how the rest is cut into writes and into receives. The link must deliver the same bytes as a simple parser
// of the frames, complete every receive once, and end.
#include <unistd.h>

#include <algorithm>

#include "muster/base/check.h"
#include "muster/transport/link_frame.h"
#include "muster/transport/link_hello.h"

namespace muster {
namespace {

constexpr uint32_t kMaxData = 16u << 20;

Deadline test_deadline() { return Deadline::after(std::chrono::seconds(60)); }
LinkIdentity identity(Rank rank) { return {rank, 2, "fuzz", 1, {}}; }

/// One loop and one listener for all inputs. The listener stores accepted links in `link`.
struct Endpoint {
  std::unique_ptr<Link> link;
  std::unique_ptr<Loop> loop = std::move(Loop::create().value());
  std::unique_ptr<Listener> listener =
      listen_links(*loop, Address::parse("unix:@muster-link-fuzz-" + std::to_string(getpid())).value(), identity(0),
                   [this](std::unique_ptr<Link> made) { link = std::move(made); })
          .value();

  std::unique_ptr<Stream> open() {
    std::unique_ptr<Stream> peer;
    const DialOptions options{{}, encode(make_hello(identity(1), LinkHello::Wire::kSocket).value())};
    const auto attempt = dial(*loop, Address::parse(listener->address()).value(), options, test_deadline(),
                              [&](Result<Connection> connection) { peer = std::move(connection.value().stream); });
    MUSTER_CHECK(loop->run_until([&] { return peer != nullptr; }, test_deadline()).has_value(), "no handshake");
    const Bytes opening = encode_frame(static_cast<uint8_t>(LinkFrame::kOpen), {});
    MUSTER_CHECK(write_to(*peer, opening), "the opening was not taken");
    MUSTER_CHECK(loop->run_until([&] { return link != nullptr; }, test_deadline()).has_value(), "no link");
    return peer;
  }

  static bool write_to(Stream& peer, ByteView bytes) {
    const iovec piece{const_cast<uint8_t*>(bytes.data()), bytes.size()};
    return peer.write({&piece, 1}).value_or(0) == bytes.size();
  }
};

Bytes payload_of(ByteView stream) {
  Bytes payload;
  while (stream.size() >= kFrameHeaderBytes) {
    const auto header = decode_frame_header(stream.first(kFrameHeaderBytes), kMaxData);
    if (!header) break;
    stream = stream.subspan(kFrameHeaderBytes);
    const auto kind = static_cast<LinkFrame>(header->kind);
    const bool data = kind == LinkFrame::kData && header->length > 0;
    const bool signal = (kind == LinkFrame::kPing || kind == LinkFrame::kPong) && header->length == 0;
    if (!data && !signal && !is_control(*header)) break;
    const ByteView part = stream.first(std::min<size_t>(header->length, stream.size()));
    if (data) payload.insert(payload.end(), part.begin(), part.end());
    stream = stream.subspan(part.size());
  }
  return payload;
}

/// Receives again and again until the link reports an error.
struct Receiver {
  explicit Receiver(Link& link, size_t size) : link(link), buffer(size) { receive(); }
  void receive() {
    const Segment segment{buffer.data(), buffer.size()};
    ++asked;
    link.receive({&segment, 1}, [this](Result<> result) {
      MUSTER_CHECK(++answered == asked, "a receive was answered twice");
      if (!result) return void(failed = true);
      received.insert(received.end(), buffer.begin(), buffer.end());
      receive();
    });
  }
  Link& link;
  Bytes buffer, received;
  uint64_t asked = 0, answered = 0;
  bool failed = false;
};

void run(ByteView stream, size_t piece, size_t receive) {
  static Endpoint endpoint;
  std::unique_ptr<Stream> peer = endpoint.open();
  int closed = 0, pongs = 0;
  endpoint.link->on_close([&](const Error& why) { closed += why.message.empty() ? 100 : 1; });
  endpoint.link->ping([&] { ++pongs; });
  Receiver receiver(*endpoint.link, receive);
  for (ByteView rest = stream; !rest.empty(); rest = rest.subspan(std::min(piece, rest.size()))) {
    if (!Endpoint::write_to(*peer, rest.first(std::min(piece, rest.size())))) break;
    endpoint.loop->poll();
  }
  peer.reset();
  MUSTER_CHECK(endpoint.loop->run_until([&] { return receiver.failed; }, test_deadline()).has_value(),
               "the link never ends");
  MUSTER_CHECK(closed == 1 && pongs <= 1 && !endpoint.link->is_open(), "a handler was called too often, or not at all");
  Bytes wanted = payload_of(stream);
  wanted.resize(wanted.size() / receive * receive);
  MUSTER_CHECK(receiver.received == wanted, "the link handed out other bytes than were sent");
  endpoint.link.reset();
}

}  // namespace
}  // namespace muster

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  // Limits the number of writes to a few hundred for an input of any length.
  const size_t piece = std::max<size_t>(size / 64, size_t{1} + data[0]);
  muster::run({data + 2, size - 2}, piece, size_t{1} + data[1]);
  return 0;
}
