// The frames on the link between a proxy and its server, after the handshake. Numbers are little-endian:
//
//   open    := frame(kind = 192, payload = version:u8(2) received:u64 resumes:u8)    the proxy's first frame
//   opened  := frame(kind = 193, payload = received:u64 known:u8)                    the server's answer
//   data    := frame(kind = 194, payload = sequence:u64 received:u64 stamp:i64 lease:i64 interval:i64 message*)
//   close   := frame(kind = 195)           the proxy's last frame, or the only one: see close_session()
//   message := request | reply             frames of messages.cpp; requests go up, replies down
//
// `sequence` counts the data frames of a session from 1, in each direction; 0 is a keepalive, which holds no message.
// `received` is the greatest sequence number that the sender has received.

#include "muster/store/session.h"

#include <fmt/format.h>

#include <algorithm>

#include "muster/base/random.h"

namespace muster {
namespace {

constexpr uint8_t kOpenKind = 192, kOpenedKind = 193, kDataKind = 194, kCloseKind = 195;
constexpr uint8_t kVersion = 2;

Result<> expect_kind(const Frame& frame, uint8_t kind) {
  if (frame.header.kind == kind && frame.header.flags == 0) return {};
  return fail(ErrorCode::kProtocol,
              fmt::format("a proxy's link brought a frame of kind {} instead of {}", frame.header.kind, kind));
}

Result<bool> get_flag(Reader& in) {
  MUSTER_ASSIGN(const auto flag, in.get<uint8_t>());
  if (flag > 1) return fail(ErrorCode::kProtocol, fmt::format("a flag on a proxy's link is {}, not 0 or 1", flag));
  return flag == 1;
}

}  // namespace

SessionId fresh_session_id() {
  SessionId id;
  fill_secure_random(id);
  return id;
}

Bytes proxy_hello(const SessionId& id) { return Writer().put_raw(as_bytes(kProxyHello)).put_raw(id).take(); }

std::optional<SessionId> session_of_hello(ByteView hello) {
  SessionId id;
  if (hello.size() != kProxyHello.size() + id.size() || !to_string(hello).starts_with(kProxyHello)) return std::nullopt;
  std::ranges::copy(hello.last(id.size()), id.begin());
  return id;
}

Bytes encode_session_close() { return encode_frame(kCloseKind, {}); }
bool is_session_close(const Frame& frame) { return frame.header.kind == kCloseKind && frame.payload.empty(); }

Bytes encode(const SessionOpen& open) {
  return encode_frame(kOpenKind, Writer().put(kVersion).put(open.received).put(open.resumes).take());
}

Bytes encode(const SessionOpened& opened) {
  return encode_frame(kOpenedKind, Writer().put(opened.received).put(opened.known).take());
}

Result<SessionOpen> decode_session_open(const Frame& frame) {
  MUSTER_TRY(expect_kind(frame, kOpenKind));
  Reader in(frame.payload);
  SessionOpen open;
  MUSTER_ASSIGN(const auto version, in.get<uint8_t>());
  if (version != kVersion) {
    return fail(ErrorCode::kProtocol, fmt::format("a proxy uses version {} of the session protocol, this server uses "
                                                  "{}; run one version of muster on all nodes",
                                                  version, kVersion));
  }
  MUSTER_ASSIGN(open.received, in.get<uint64_t>());
  MUSTER_ASSIGN(open.resumes, get_flag(in));
  MUSTER_TRY(in.finish());
  return open;
}

Result<SessionOpened> decode_session_opened(const Frame& frame) {
  MUSTER_TRY(expect_kind(frame, kOpenedKind));
  Reader in(frame.payload);
  SessionOpened opened;
  MUSTER_ASSIGN(opened.received, in.get<uint64_t>());
  MUSTER_ASSIGN(opened.known, get_flag(in));
  MUSTER_TRY(in.finish());
  return opened;
}

void ReliableSession::put(ByteView message) {
  const bool fits = !kept_.empty() && kept_.back().sequence > sent_ &&
                    kept_.back().messages.size() + message.size() <= limits_.frame_bytes;
  if (!fits) kept_.push_back({++last_, {}});
  Bytes& batch = kept_.back().messages;
  batch.insert(batch.end(), message.begin(), message.end());
  bytes_ += message.size();
}

Result<> ReliableSession::connect(uint64_t peer_received) {
  MUSTER_TRY(acknowledge(peer_received));
  sent_ = peer_received;
  connected_ = true;
  return {};
}

Result<> ReliableSession::acknowledge(uint64_t sequence) {
  const uint64_t oldest = last_ - kept_.size();  // acknowledged before
  if (sequence < oldest || sequence > last_) {
    return fail(ErrorCode::kProtocol,
                fmt::format("the other end says that it has {} frames, expected {} to {}", sequence, oldest, last_));
  }
  while (!kept_.empty() && kept_.front().sequence <= sequence) {
    bytes_ -= kept_.front().messages.size();
    kept_.pop_front();
  }
  return {};
}

size_t ReliableSession::write(Bytes& out, const FrameTiming& timing) {
  if (!connected_ || sent_ == last_) return 0;
  for (size_t i = kept_.size() - (last_ - sent_); i < kept_.size(); ++i) {
    write_frame(out, kept_[i].sequence, kept_[i].messages, timing);
  }
  return last_ - std::exchange(sent_, last_);
}

void ReliableSession::write_keepalive(Bytes& out, const FrameTiming& timing) {
  if (connected_) write_frame(out, 0, {}, timing);
}

void ReliableSession::write_frame(Bytes& out, uint64_t sequence, ByteView messages, const FrameTiming& timing) {
  Writer writer;
  writer.put_raw(encode(FrameHeader{static_cast<uint32_t>(Received::kHeaderBytes + messages.size()), kDataKind, 0}));
  writer.put(sequence).put(received_).put(timing.stamp).put(timing.lease).put(timing.interval);
  out.insert(out.end(), writer.bytes().begin(), writer.bytes().end());
  out.insert(out.end(), messages.begin(), messages.end());
  unacked_input_ = 0;
}

Result<ReliableSession::Received> ReliableSession::receive(Frame frame) {
  MUSTER_TRY(expect_kind(frame, kDataKind));
  Reader in(frame.payload);
  Received received;
  MUSTER_ASSIGN(const auto sequence, in.get<uint64_t>());
  MUSTER_ASSIGN(const auto has, in.get<uint64_t>());
  MUSTER_ASSIGN(received.timing.stamp, in.get<int64_t>());
  MUSTER_ASSIGN(received.timing.lease, in.get<int64_t>());
  MUSTER_ASSIGN(received.timing.interval, in.get<int64_t>());
  if (has > sent_) {
    return fail(ErrorCode::kProtocol,
                fmt::format("the peer acknowledges frame {}, but {} were sent to it", has, sent_));
  }
  MUSTER_TRY(acknowledge(has));
  received.keepalive = sequence == 0;
  if (received.keepalive) {
    MUSTER_TRY(in.finish());
    return received;
  }
  if (sequence > received_ + 1) {
    return fail(ErrorCode::kProtocol, fmt::format("frame {} follows frame {} on a proxy's link", sequence, received_));
  }
  if (sequence <= received_) return received;  // received before
  received_ = sequence;
  unacked_input_ += frame.payload.size();
  received.payload = std::move(frame.payload);
  return received;
}

}  // namespace muster
