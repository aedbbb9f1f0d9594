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
  if (!refusal && !takes_back(request.operation) && session_.unacknowledged() > options_.max_unacknowledged) {
    refusal =
        Error{ErrorCode::kResourceExhausted, "the store at " + options_.server + " does not keep up", kNoRank, {}};
  }
  if (!refusal || request.operation == StoreOperation::kCancel || request.operation == StoreOperation::kRelease) {
    return proxy_.submit(std::move(request), client, now);
  }
  proxy_.refuse(request, client, *refusal);
}

void ProxyLink::drop(ClientId client, TimePoint now) { proxy_.drop(client, now); }

// What it holds may be passed on only once the server knows that there is somebody below: pace() tells it with each
// frame. So leases from before are given back, and later ones were asked for by such a frame.
void ProxyLink::serves_proxies(size_t count) {
  if (proxies_ == 0 && count > 0) proxy_.give_back_all();
  proxies_ = static_cast<int64_t>(count);
}

Duration ProxyLink::lease_left(TimePoint now) const { return now < lease_end_ ? lease_end_ - now : Duration{0}; }

Bytes ProxyLink::begin(TimePoint now) {
  linked_ = true;
  heard_ = written_ = now;
  parser_ = FrameParser(kMaxTierFrameBytes);
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
    // What comes after cannot be understood, on this link or another.
    if (!lost_) give_up(taken.error().message);
    return taken;
  }
}

Result<> ProxyLink::on_opened(const Frame& frame) {
  MUSTER_ASSIGN(const SessionOpened opened, decode_session_opened(frame));
  if (!opened.known) return fail(ErrorCode::kPeerLost, "it does not know this node any more, so it was started anew");
  MUSTER_TRY(session_.connect(opened.received));
  resumes_ = true;
  return {};
}

Result<> ProxyLink::on_frame(Frame frame, TimePoint now) {
  heard_ = now;
  if (!session_.connected()) return on_opened(frame);
  MUSTER_ASSIGN(const auto received, session_.receive(std::move(frame)));
  const TimePoint end = TimePoint{received.pulse.stamp} + Duration(received.pulse.lease);
  proxy_.set_lease_end(end, now);
  lease_end_ = std::max(lease_end_, end);
  beat_ = std::clamp(Duration(received.pulse.beat), kBeat, kMaxBeatGrowth * kBeat);
  if (timing_ && received.pulse.stamp >= sent_.ns && received.pulse.stamp <= now.ns) {
    timing_ = false;
    // The server may have had nothing to say for a while: what is long counts for little.
    const Duration trip = now - TimePoint{received.pulse.stamp};
    round_trip_ = std::min(trip, round_trip_ + std::max<Duration>(round_trip_ / 8, kShortestGap / 8));
  }
  return for_each_message(received.messages(), [&](const FrameHeader& header, ByteView payload) -> Result<> {
    MUSTER_ASSIGN(Reply reply, decode_reply(header, payload));
    proxy_.receive(std::move(reply), now);
    return {};
  });
}

Duration ProxyLink::gap() const {
  const auto waiting = static_cast<int64_t>(proxy_.pending());
  if (waiting > kMany) return std::max(pace(), std::min(waiting * kGapPerRequest, kLongestGapOfMany));
  return std::max(pace(), std::clamp(2 * round_trip_, kShortestGap, kLongestGap));
}

TimePoint ProxyLink::beat_due() const {
  const bool idle = proxy_.pending() == 0 && written_ - asked_ >= kIdleBeat;
  return written_ + (idle ? std::max(kIdleBeat, beat_) : beat_);
}

bool ProxyLink::silent(TimePoint now) const { return linked_ && now - heard_ > std::max(kSilence, 2 * beat_ + kBeat); }

void ProxyLink::write(Bytes& out, TimePoint now) {
  if (lost_ || !session_.connected()) return;
  gathers_ = options_.proxy.merge && proxy_.pending() > 1 && now < sent_ + gap();
  if (!gathers_) put_requests(now);
  const size_t before = out.size();
  const FrameTiming pulse{now.ns, 0, pace().count()};
  if (session_.write(out, pulse) > 0) {
    sent_ = now;
    timing_ = true;
  }
  if (out.size() == before && (session_.wants_ack() || now >= beat_due())) session_.write_beat(out, pulse);
  if (out.size() != before) written_ = now;
}

void ProxyLink::put_requests(TimePoint now) {
  for (const Request& request : proxy_.take_requests(now)) {
    const auto message = encode_request(request);
    if (message) {
      session_.put(*message);
      continue;
    }
    Reply refused;
    refused.id = request.id;
    refused.status = tl::unexpected(message.error());
    proxy_.receive(std::move(refused), now);
  }
}

std::optional<TimePoint> ProxyLink::next_wake() const {
  if (lost_ || !linked_) return std::nullopt;
  if (session_.connected() && gathers_) return sent_ + gap();
  const auto wake = session_.connected() ? proxy_.next_wake() : std::nullopt;
  return wake ? std::min(*wake, beat_due()) : beat_due();
}

void ProxyLink::give_up(const std::string& why) {
  lost_ = Error{ErrorCode::kPeerLost,
                fmt::format("this node's proxy lost the store at {}: {}", options_.server, why),
                kNoRank,
                {}};
  link_lost();
  proxy_.fail(*lost_);
}

}  // namespace muster
