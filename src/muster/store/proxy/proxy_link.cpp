#include "muster/store/proxy/proxy_link.h"

#include <fmt/format.h>

#include <algorithm>

#include "muster/store/protocol/messages.h"

namespace muster {

ProxyLink::ProxyLink(Options options, SessionId session)
    : options_(std::move(options)), id_(session), proxy_(options_.proxy) {}

void ProxyLink::submit(Request request, ClientId client, TimePoint now) {
  asked_ = now;
  std::optional<Error> refusal = lost_;
  if (!refusal && !has(request.operation, kTakesBack) && session_.unacknowledged() > options_.max_unacknowledged) {
    refusal = Error{ErrorCode::kResourceExhausted, "the store at " + options_.server + " does not keep up"};
  }
  if (!refusal || request.operation == StoreOperation::kCancel || request.operation == StoreOperation::kRelease) {
    return proxy_.submit(std::move(request), client, now);
  }
  proxy_.refuse(request, client, *refusal);
}

// This proxy may pass a lease on only if the server knew about the proxies below when it granted the lease. Each frame
// tells the server about them, by an interval above 0. So this proxy gives back the leases that it got before.
void ProxyLink::serves_proxies(size_t count) {
  if (proxies_ == 0 && count > 0) proxy_.give_back_all();
  proxies_ = static_cast<int64_t>(count);
}

Duration ProxyLink::lease_left(TimePoint now) const { return now < lease_end_ ? lease_end_ - now : Duration{0}; }

Bytes ProxyLink::begin(TimePoint now) {
  linked_ = true;
  heard_ = written_ = now;
  parser_ = FrameParser(kMaxSessionFrameBytes);
  return encode(SessionOpen{session_.received(), resumes_});
}

void ProxyLink::link_lost() {
  linked_ = false;
  session_.disconnect();
}

Result<> ProxyLink::receive(ByteView bytes, TimePoint now) {
  parser_.feed(bytes);
  while (true) {
    auto frame = parser_.next();
    if (frame && !*frame) return {};
    Result<> taken = frame ? on_frame(std::move(**frame), now) : tl::unexpected(frame.error());
    if (taken) continue;
    // The proxy cannot parse later input either, neither on this link nor on the next link.
    if (!lost_) give_up(taken.error().message);
    return taken;
  }
}

Result<> ProxyLink::on_opened(const Frame& frame) {
  MUSTER_ASSIGN(const SessionOpened opened, decode_session_opened(frame));
  if (!opened.known)
    return fail(ErrorCode::kPeerLost, "the server no longer knows this proxy's session: it was restarted");
  MUSTER_TRY(session_.connect(opened.received));
  resumes_ = true;
  return {};
}

Result<> ProxyLink::on_frame(Frame frame, TimePoint now) {
  heard_ = now;
  if (!session_.connected()) return on_opened(frame);
  MUSTER_ASSIGN(const auto received, session_.receive(std::move(frame)));
  const TimePoint end = TimePoint{received.timing.stamp} + Duration(received.timing.lease);
  proxy_.set_lease_end(end, now);
  lease_end_ = std::max(lease_end_, end);
  keepalive_interval_ =
      std::clamp(Duration(received.timing.interval), kKeepaliveInterval, kMaxIntervalGrowth * kKeepaliveInterval);
  if (timing_ && received.timing.stamp >= sent_.ns && received.timing.stamp <= now.ns) {
    timing_ = false;
    // The server may have had nothing to send for a while, so a long time raises the estimate only a little.
    const Duration trip = now - TimePoint{received.timing.stamp};
    round_trip_ = std::min(trip, round_trip_ + std::max<Duration>(round_trip_ / 8, kMinGap / 8));
  }
  return for_each_message(received.messages(), [&](const FrameHeader& header, ByteView payload) -> Result<> {
    MUSTER_ASSIGN(Reply reply, decode_reply(header, payload));
    proxy_.receive(std::move(reply), now);
    return {};
  });
}

Duration ProxyLink::gap() const {
  const auto waiting = static_cast<int64_t>(proxy_.pending());
  if (waiting > kManyRequests) return std::max(min_interval(), std::min(waiting * kGapPerRequest, kMaxGapOfMany));
  return std::max(min_interval(), std::clamp(2 * round_trip_, kMinGap, kMaxGap));
}

TimePoint ProxyLink::keepalive_due() const {
  const bool idle = proxy_.pending() == 0 && written_ - asked_ >= kIdleInterval;
  return written_ + (idle ? std::max(kIdleInterval, keepalive_interval_) : keepalive_interval_);
}

bool ProxyLink::silent(TimePoint now) const {
  return linked_ && now - heard_ > std::max(kSilence, 2 * keepalive_interval_ + kKeepaliveInterval);
}

void ProxyLink::write(Bytes& out, TimePoint now) {
  if (lost_ || !session_.connected()) return;
  gathers_ = options_.proxy.merge && proxy_.pending() > 1 && now < sent_ + gap();
  if (!gathers_) put_requests(now);
  const size_t before = out.size();
  const FrameTiming timing{now.ns, 0, min_interval().count()};
  if (session_.write(out, timing) > 0) {
    sent_ = now;
    timing_ = true;
  }
  if (out.size() == before && (session_.wants_ack() || now >= keepalive_due())) session_.write_keepalive(out, timing);
  if (out.size() != before) written_ = now;
}

void ProxyLink::put_requests(TimePoint now) {
  for (const Request& request : proxy_.take_requests(now)) {
    const auto message = encode_request(request);
    if (message) {
      session_.put(*message);
    } else {
      proxy_.receive({.id = request.id, .status = tl::unexpected(message.error())}, now);
    }
  }
}

std::optional<TimePoint> ProxyLink::next_wake() const {
  if (lost_ || !linked_) return std::nullopt;
  if (session_.connected() && gathers_) return sent_ + gap();
  const auto wake = session_.connected() ? proxy_.next_wake() : std::nullopt;
  return wake ? std::min(*wake, keepalive_due()) : keepalive_due();
}

void ProxyLink::give_up(const std::string& why) {
  lost_ = Error{ErrorCode::kPeerLost, fmt::format("this node's proxy lost the store at {}: {}", options_.server, why)};
  link_lost();
  proxy_.fail(*lost_);
}

}  // namespace muster
