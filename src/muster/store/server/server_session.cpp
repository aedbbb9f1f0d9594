#include "muster/store/server/server_session.h"

#include <algorithm>

#include "muster/store/protocol/messages.h"

namespace muster {

void ServerSession::link_up() {
  link_lost();
  expiry_.link_up();
  parser_ = FrameParser(kMaxSessionFrameBytes);
}

void ServerSession::link_lost() {
  expiry_.link_lost();
  opened_due_ = keepalive_due_ = false;
  session_.disconnect();
}

Result<ServerSession::Input> ServerSession::receive(ByteView bytes) {
  expiry_.heard();
  parser_.feed(bytes);
  Input input;
  while (!closed_) {
    MUSTER_ASSIGN(auto frame, parser_.next());
    if (!frame) break;
    ++input.frames;
    MUSTER_TRY(on_frame(std::move(*frame), input));
  }
  input.closed = closed_;
  return input;
}

Result<> ServerSession::open(const Frame& frame) {
  MUSTER_ASSIGN(const SessionOpen open, decode_session_open(frame));
  opened_due_ = true;
  if (open.resumes && !known_) return {};  // the next write() tells the proxy that its session is not known
  known_ = true;
  return session_.connect(open.received);
}

Result<> ServerSession::on_frame(Frame frame, Input& input) {
  closed_ = is_session_close(frame);
  if (closed_) return {};
  if (!session_.connected()) return open(frame);
  MUSTER_ASSIGN(const auto received, session_.receive(std::move(frame)));
  stamp_ = received.timing.stamp;
  min_interval_ = std::clamp(Duration(received.timing.interval), Duration{0}, kMaxMinInterval);
  served_proxies_ = served_proxies_ || min_interval_ > Duration{0};
  keepalive_due_ = keepalive_due_ || received.keepalive;
  return for_each_message(received.messages(), [&](const FrameHeader& header, ByteView payload) -> Result<> {
    MUSTER_ASSIGN(input.requests.emplace_back(), decode_request(header, payload));
    return {};
  });
}

void ServerSession::reply(const Reply& reply) {
  Bytes message = encode_reply(reply);
  if (reply.leased && reply.granted < grants_ended_) withdraw_leases(message);
  session_.put(message);
}

void ServerSession::end_grants(uint64_t revocations) {
  if (revocations <= grants_ended_) return;
  grants_ended_ = revocations;
  session_.for_each_kept(withdraw_leases);
}

size_t ServerSession::write(Bytes& out, size_t proxies, Duration lease_left) {
  if (!linked()) return 0;
  size_t frames = 0;
  if (std::exchange(opened_due_, false)) {
    const Bytes opened = encode(SessionOpened{session_.received(), session_.connected()});
    out.insert(out.end(), opened.begin(), opened.end());
    ++frames;
  }
  const SessionExpiry::Grant grant = expiry_.grant(proxies, lease_left);
  const FrameTiming timing{stamp_, grant.lease.count(), grant.keepalive_interval.count()};
  const size_t written = session_.write(out, timing);
  if (written == 0 && session_.connected() && (keepalive_due_ || session_.wants_ack())) {
    session_.write_keepalive(out, timing);
    ++frames;
  }
  keepalive_due_ = false;
  return frames + written;
}

}  // namespace muster
