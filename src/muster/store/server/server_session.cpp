#include "muster/store/server/server_session.h"

#include <algorithm>

#include "muster/store/protocol/messages.h"

namespace muster {

void ServerSession::link_up(TimePoint now) {
  link_lost();
  linked_ = true;
  heard_ = now;
  parser_ = FrameParser(kMaxTierFrameBytes);
}

void ServerSession::link_lost() {
  linked_ = opened_ = beat_ = false;
  session_.disconnect();
}

Result<ServerSession::Input> ServerSession::receive(ByteView bytes, TimePoint now) {
  heard_ = now;
  parser_.feed(bytes);
  Input input;
  while (!input.closed) {
    MUSTER_ASSIGN(auto frame, parser_.next());
    if (!frame) break;
    ++input.frames;
    MUSTER_TRY(on_frame(std::move(*frame), input));
  }
  return input;
}

Result<> ServerSession::open(const Frame& frame) {
  MUSTER_ASSIGN(const SessionOpen open, decode_session_open(frame));
  opened_ = true;
  if (open.resumes && !known_) return {};  // told with the next write()
  known_ = true;
  return session_.connect(open.received);
}

Result<> ServerSession::on_frame(Frame frame, Input& input) {
  input.closed = is_session_close(frame);
  if (input.closed) return {};
  if (!session_.connected()) return open(frame);
  MUSTER_ASSIGN(const auto received, session_.receive(std::move(frame)));
  stamp_ = received.pulse.stamp;
  pace_ = std::clamp(Duration(received.pulse.beat), Duration{0}, kLongestPace);
  served_proxies_ = served_proxies_ || pace_ > Duration{0};
  beat_ = beat_ || received.beat;
  return for_each_message(received.messages(), [&](const FrameHeader& header, ByteView payload) -> Result<> {
    MUSTER_ASSIGN(Request request, decode_request(header, payload));
    input.requests.push_back(std::move(request));
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

size_t ServerSession::write(Bytes& out, Duration lease, Duration beat) {
  if (!linked_) return 0;
  size_t frames = 0;
  if (std::exchange(opened_, false)) {
    const Bytes opened = encode(SessionOpened{session_.received(), session_.connected()});
    out.insert(out.end(), opened.begin(), opened.end());
    ++frames;
  }
  const FrameTiming pulse{stamp_, lease.count(), beat.count()};
  const size_t written = session_.write(out, pulse);
  if (written == 0 && session_.connected() && (beat_ || session_.wants_ack())) {
    session_.write_beat(out, pulse);
    ++frames;
  }
  beat_ = false;
  return frames + written;
}

}  // namespace muster
