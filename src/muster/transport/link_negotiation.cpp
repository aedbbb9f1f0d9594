#include "muster/transport/link_negotiation.h"

#include <sys/epoll.h>

#include <algorithm>

#include "muster/transport/socket/lingering_close.h"

namespace muster {

LinkNegotiation::LinkNegotiation(Loop& loop, Connection connection, LinkHello self, Rank expected,
                                 const Deadline& deadline, NegotiatedLinkHandler handler)
    : loop_(loop),
      connection_(std::move(connection)),
      self_(std::move(self)),
      expected_(expected),
      handler_(std::move(handler)) {
  begin_timer_ = loop_.after(Duration::zero(), [this] { begin(); });
  deadline_timer_ = loop_.at(deadline.when(), [this] {
    finish(fail(ErrorCode::kTimeout, peer_.to_string() + " finished the handshake but did not open its link in time",
                peer_.rank));
  });
}

LinkNegotiation::~LinkNegotiation() { stop(); }

void LinkNegotiation::begin() {
  if (Result<> agreed = check(); !agreed) {
    linger(loop_, std::move(connection_.stream), encode_close(&agreed.error()));
    return finish(tl::unexpected(agreed.error()));
  }
  output_ = encode_frame(static_cast<uint8_t>(LinkFrame::kOpen), {});
  const Result<> watched = loop_.watch(connection_.stream->fd(), EPOLLIN, [this](uint32_t) { advance(); });
  if (!watched) return finish(tl::unexpected(watched.error()));
  advance();
}

Result<> LinkNegotiation::check() {
  const Result<LinkHello> hello = parse_hello(connection_.hello);
  if (!hello) {
    return fail(hello.error().code, "a peer at " + connection_.peer.to_string() + ": " + hello.error().message);
  }
  peer_ = *hello;
  return check_hello(self_, *hello, expected_);
}

void LinkNegotiation::advance() {
  write();
  const Result<bool> negotiated = read();
  if (!negotiated) return finish(tl::unexpected(negotiated.error()));
  if (*negotiated && output_.empty()) {
    loop_.unwatch(connection_.stream->fd());
    return finish(NegotiatedLink{std::move(connection_), peer_});
  }
  uint32_t events = *negotiated ? 0 : uint32_t{EPOLLIN};
  if (connection_.stream->wants_write()) events |= EPOLLOUT;
  if (Result<> changed = loop_.modify(connection_.stream->fd(), events); !changed) {
    finish(tl::unexpected(changed.error()));
  }
}

/// Does not report a failed write: the peer may have sent a reason, which is read next.
void LinkNegotiation::write() {
  while (!output_.empty()) {
    const Result<size_t> written = connection_.stream->write(output_);
    if (written && *written == 0) return;
    output_.erase(output_.begin(), output_.begin() + static_cast<ptrdiff_t>(written ? *written : output_.size()));
  }
}

/// True if the peer has sent its open frame; an error if it has sent a close frame.
Result<bool> LinkNegotiation::read() {
  MUSTER_ASSIGN(const bool has_header, fill(kFrameHeaderBytes));
  if (!has_header) return false;
  const Result<FrameHeader> header = decode_frame_header(ByteView(input_).first(kFrameHeaderBytes), kMaxControlFrame);
  if (!header) return tl::unexpected(link_error(header.error(), peer_));
  if (header->kind == static_cast<uint8_t>(LinkFrame::kOpen) && header->length == 0) return true;
  MUSTER_ASSIGN(const bool whole, fill(kFrameHeaderBytes + header->length));
  if (!whole) return false;
  return tl::unexpected(parse_close(*header, ByteView(input_).subspan(kFrameHeaderBytes), peer_));
}

/// Reads until `input_` has exactly `bytes`. False if the socket has no more bytes now.
Result<bool> LinkNegotiation::fill(size_t bytes) {
  Bytes& leftover = connection_.leftover;
  const size_t ready = std::min(leftover.size(), bytes - std::min(bytes, input_.size()));
  input_.insert(input_.end(), leftover.begin(), leftover.begin() + static_cast<ptrdiff_t>(ready));
  leftover.erase(leftover.begin(), leftover.begin() + static_cast<ptrdiff_t>(ready));
  while (input_.size() < bytes) {
    const size_t had = input_.size();
    input_.resize(bytes);
    const Result<size_t> got = connection_.stream->read(MutableByteView(input_).subspan(had));
    input_.resize(had + (got ? *got : 0));
    if (!got) return tl::unexpected(link_error(got.error(), peer_));
    if (*got == 0) return false;
  }
  return true;
}

void LinkNegotiation::stop() {
  if (connection_.stream) loop_.unwatch(connection_.stream->fd());
  loop_.cancel(begin_timer_);
  loop_.cancel(deadline_timer_);
}

// The handler may destroy this object, so its call comes last.
void LinkNegotiation::finish(Result<NegotiatedLink> result) {
  stop();
  const NegotiatedLinkHandler handler = std::move(handler_);
  handler(std::move(result));
}

}  // namespace muster
