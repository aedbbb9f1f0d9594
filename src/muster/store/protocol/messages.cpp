// The store's messages, one frame of io/frame.h each. Numbers are little-endian:
//
//   request := frame(kind = StoreOperation, flags = immediate + 2 * lease + 4 * weighted,
//                    payload = id:u64 number:i64 keys:list values:list [weight:u32 if weighted])
//   reply   := frame(kind = 128, flags = leased + 2 * recall, payload = id:u64 code:u8 body)
//   body    := number:i64 keys:list values:list                       when code is 0
//            | rank:i32 message:bytes context:bytes                   otherwise; code - 1 is the ErrorCode
//   list    := count:u32 bytes[count]
//   bytes   := length:u32 u8[length]
//
// `id` is the client's number for the request. Replies come in any order, so a waiting request does not delay other
// requests. A cancel carries the id of the request that it ends. A cancel has no reply of its own.

#include "muster/store/protocol/messages.h"

#include <fmt/format.h>

#include <algorithm>

#include "muster/base/check.h"

namespace muster {
namespace {

// Flags of requests and of replies. Only proxies ask for leases and use weights.
constexpr uint8_t kImmediateFlag = 1, kLeaseFlag = 2, kWeightedFlag = 4;
constexpr uint8_t kLeasedFlag = 1, kRecallFlag = 2;

template <class List>
size_t list_bytes(const List& list) {
  size_t total = sizeof(uint32_t);
  for (const auto& item : list) total += sizeof(uint32_t) + item.size();
  return total;
}

Writer& put_lists(Writer& out, const std::vector<Key>& keys, const std::vector<Bytes>& values) {
  out.put(static_cast<uint32_t>(keys.size()));
  for (const Key& key : keys) out.put_string(key);
  out.put(static_cast<uint32_t>(values.size()));
  for (const Bytes& value : values) out.put_bytes(value);
  return out;
}

// Each item takes at least the bytes of its length field. So a count that is too large for the message fails before
// memory is allocated.
Result<uint32_t> get_count(Reader& in) {
  MUSTER_ASSIGN(const auto count, in.get<uint32_t>());
  if (count <= in.remaining() / sizeof(uint32_t)) return count;
  return fail(ErrorCode::kProtocol,
              fmt::format("a store message of {1} more bytes cannot hold {0} items", count, in.remaining()));
}

Result<> get_lists(Reader& in, std::vector<Key>& keys, std::vector<Bytes>& values) {
  MUSTER_ASSIGN(const auto key_count, get_count(in));
  keys.reserve(key_count);
  for (uint32_t i = 0; i < key_count; ++i) {
    MUSTER_ASSIGN(keys.emplace_back(), in.get_string());
  }
  MUSTER_ASSIGN(const auto value_count, get_count(in));
  values.reserve(value_count);
  for (uint32_t i = 0; i < value_count; ++i) {
    MUSTER_ASSIGN(const ByteView value, in.get_bytes());
    values.emplace_back(value.begin(), value.end());
  }
  return {};
}

Writer start_frame(size_t length, uint8_t kind, uint8_t flags) {
  Writer out;
  out.put_raw(encode(FrameHeader{static_cast<uint32_t>(length), kind, flags}));
  return out;
}

}  // namespace

Result<Bytes> encode_request(const Request& request) {
  const auto flags = static_cast<uint8_t>((request.immediate ? kImmediateFlag : 0) | (request.lease ? kLeaseFlag : 0) |
                                          (request.weight != 1 ? kWeightedFlag : 0));
  const size_t length = 2 * sizeof(uint64_t) + list_bytes(request.keys) + list_bytes(request.values) +
                        ((flags & kWeightedFlag) != 0 ? sizeof(uint32_t) : 0);
  if (length > kMaxMessageBytes) {
    return fail(ErrorCode::kResourceExhausted,
                fmt::format("{} of {} keys is {} bytes in all, the limit is {}", name(request.operation),
                            request.keys.size(), length, kMaxMessageBytes));
  }
  Writer out = start_frame(length, static_cast<uint8_t>(request.operation), flags);
  out.put(request.id).put(request.number);
  put_lists(out, request.keys, request.values);
  if ((flags & kWeightedFlag) != 0) out.put(request.weight);
  return out.take();
}

Result<Request> decode_request(const FrameHeader& header, ByteView payload) {
  if (header.kind < static_cast<uint8_t>(StoreOperation::kSet) || header.kind >= std::size(kOperations) ||
      header.flags > (kImmediateFlag | kLeaseFlag | kWeightedFlag)) {
    return fail(ErrorCode::kProtocol,
                fmt::format("no store request has kind {} and flags {}", header.kind, header.flags));
  }
  Request request;
  request.operation = static_cast<StoreOperation>(header.kind);
  request.immediate = (header.flags & kImmediateFlag) != 0;
  request.lease = (header.flags & kLeaseFlag) != 0;
  Reader in(payload);
  MUSTER_ASSIGN(request.id, in.get<RequestId>());
  MUSTER_ASSIGN(request.number, in.get<int64_t>());
  MUSTER_TRY(get_lists(in, request.keys, request.values));
  if ((header.flags & kWeightedFlag) != 0) {
    MUSTER_ASSIGN(request.weight, in.get<uint32_t>());
    if (request.weight == 1) return fail(ErrorCode::kProtocol, "a store request says that it weighs 1");
  }
  MUSTER_TRY(in.finish());
  return request;
}

Bytes encode_reply(const Reply& reply) {
  if (!reply.status) {
    const Error& error = reply.status.error();
    const size_t length = 13 + 8 + error.message.size() + error.context.size();
    Writer out = start_frame(length, kReplyKind, 0);
    out.put(reply.id).put(static_cast<uint8_t>(static_cast<uint8_t>(error.code) + 1)).put(int32_t{error.rank});
    return out.put_string(error.message).put_string(error.context).take();
  }
  const size_t length = 17 + list_bytes(reply.keys) + list_bytes(reply.values);
  if (length > kMaxMessageBytes) {
    return encode_reply({reply.client, reply.id,
                         fail(ErrorCode::kResourceExhausted,
                              fmt::format("the answer would be {} bytes, the limit is {}; ask for fewer keys at once",
                                          length, kMaxMessageBytes))});
  }
  const auto flags = static_cast<uint8_t>((reply.leased ? kLeasedFlag : 0) | (reply.recall ? kRecallFlag : 0));
  Writer out = start_frame(length, kReplyKind, flags);
  out.put(reply.id).put(uint8_t{0}).put(reply.number);
  return put_lists(out, reply.keys, reply.values).take();
}

void withdraw_leases(Bytes& replies) {
  for (size_t at = 0; at < replies.size();) {
    const auto rest = ByteView(replies).subspan(at);
    const auto header = decode_frame_header(rest, kMaxMessageBytes);
    MUSTER_CHECK(header && header->length <= rest.size() - kFrameHeaderBytes, "invalid encoded reply");
    const auto flags = static_cast<uint8_t>(header->flags & ~kLeasedFlag);
    const auto changed = encode(FrameHeader{header->length, header->kind, flags});
    std::copy(changed.begin(), changed.end(), replies.begin() + static_cast<ptrdiff_t>(at));
    at += kFrameHeaderBytes + header->length;
  }
}

Result<Reply> decode_reply(const FrameHeader& header, ByteView payload) {
  if (header.kind != kReplyKind || header.flags > (kLeasedFlag | kRecallFlag)) {
    return fail(ErrorCode::kProtocol,
                fmt::format("no store reply has kind {} and flags {}", header.kind, header.flags));
  }
  Reply reply;
  Reader in(payload);
  MUSTER_ASSIGN(reply.id, in.get<RequestId>());
  MUSTER_ASSIGN(const auto code, in.get<uint8_t>());
  if (code == 0) {
    reply.leased = (header.flags & kLeasedFlag) != 0;
    reply.recall = (header.flags & kRecallFlag) != 0;
    MUSTER_ASSIGN(reply.number, in.get<int64_t>());
    MUSTER_TRY(get_lists(in, reply.keys, reply.values));
    MUSTER_TRY(in.finish());
    return reply;
  }
  if (header.flags != 0) return fail(ErrorCode::kProtocol, "a store error grants or recalls leases");
  Error error;
  error.code = static_cast<ErrorCode>(code - 1);
  if (error.code > ErrorCode::kIo) error.code = ErrorCode::kInternal;  // a code of a newer server
  MUSTER_ASSIGN(error.rank, in.get<int32_t>());
  MUSTER_ASSIGN(error.message, in.get_string());
  MUSTER_ASSIGN(error.context, in.get_string());
  MUSTER_TRY(in.finish());
  reply.status = tl::unexpected(std::move(error));
  return reply;
}

Result<std::optional<Reply>> next_reply(FrameParser& parser) {
  MUSTER_ASSIGN(const auto frame, parser.next());
  if (!frame) return std::nullopt;
  return decode_reply(frame->header, frame->payload);
}

}  // namespace muster
