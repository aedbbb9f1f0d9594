#include "muster/transport/link_frame.h"

#include <fmt/format.h>

#include "muster/transport/link_base.h"

namespace muster {
namespace {

constexpr size_t kMaxText = 1024;

Result<Error> parse_close_payload(ByteView payload, int group_size) {
  Reader reader(payload);
  Error why;
  MUSTER_ASSIGN(why.code, reader.get<ErrorCode>());
  MUSTER_ASSIGN(why.rank, reader.get<int32_t>());
  MUSTER_ASSIGN(why.phase, reader.get<GroupPhase>());
  MUSTER_ASSIGN(why.message, reader.get_string());
  MUSTER_ASSIGN(why.context, reader.get_string());
  MUSTER_TRY(reader.finish());
  if (why.code > kLastErrorCode) return fail(ErrorCode::kProtocol, "a close frame holds an unknown error code");
  if (why.phase > GroupPhase::kLeft) return fail(ErrorCode::kProtocol, "a close frame holds an unknown phase");
  if (why.rank < kNoRank || why.rank >= group_size) {
    return fail(ErrorCode::kProtocol, "a close frame names a rank that does not exist");
  }
  return why;
}

}  // namespace

Bytes encode_close(const Error* why) {
  if (why == nullptr) return encode_frame(static_cast<uint8_t>(LinkFrame::kShutdown), {});
  Writer writer;
  writer.put(why->code).put(int32_t{why->rank}).put(why->phase);
  writer.put_string(std::string_view(why->message).substr(0, kMaxText));
  writer.put_string(std::string_view(why->context).substr(0, kMaxText));
  return encode_frame(static_cast<uint8_t>(LinkFrame::kClose), writer.bytes());
}

Error parse_close(const FrameHeader& header, ByteView payload, const Peer& peer) {
  if (header.kind == static_cast<uint8_t>(LinkFrame::kShutdown) && payload.empty()) return shutdown_error(peer);
  if (header.kind == static_cast<uint8_t>(LinkFrame::kClose)) {
    Result<Error> why = parse_close_payload(payload, peer.size);
    if (!why) return link_error(why.error(), peer);
    why->reported_by = peer.rank;
    return std::move(*why);
  }
  return link_error(Error{ErrorCode::kProtocol, fmt::format("unexpected frame of kind {}", header.kind), kNoRank, {}},
                    peer);
}

Error link_error(const Error& error, const Peer& peer) {
  const bool lost = error.code == ErrorCode::kPeerLost;
  const bool failed =
      error.code == ErrorCode::kIo || error.code == ErrorCode::kTimeout || error.code == ErrorCode::kUnavailable;
  return Error{lost || failed ? ErrorCode::kPeerLost : error.code,
               fmt::format("{} {}: {}", peer.to_string(), lost ? "closed its link" : "failed its link", error.message),
               peer.rank, error.context};
}

}  // namespace muster
