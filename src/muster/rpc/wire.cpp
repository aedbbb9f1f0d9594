// The bytes of a link between two agents, in both directions:
//
//   stream  := { batch long-part* }
//   batch   := bytes:u32 zero:u32 message+        bytes: of the messages
//   message := kind:u8 flags:u8 name_bytes:u16 segments:u32 id:u64 timeout_us:u64 head_bytes:u64
//              name[name_bytes] segment_bytes:u64[segments] inline-part*
//   error   := code:u8 message:string type:string traceback:string          the head of a kError message
//   string  := length:u32 bytes[length]
//
// The parts of a message are its head and its segments, in this order. A part of at most 16 KiB is inline while the
// inline parts of the message have at most 64 KiB. The other parts, the long ones, follow the batch in the same order.
// Only the last message of a batch has long parts. Little-endian. A hello has the name of the dialer, the version of
// this format in `flags`, and a head of pid:i32 process_domain:string; the acceptor sends none. `id` numbers the
// requests of the dialer from 1; answers have the id of their request. Only requests and replies have long parts.
#include "muster/rpc/wire.h"

#include <fmt/format.h>

#include <cstring>

namespace muster::rpc {
namespace {

bool is_kind(Kind kind) { return kind >= Kind::kHello && kind <= Kind::kStarted; }

tl::unexpected<Error> invalid(const std::string& what) {
  return fail(ErrorCode::kProtocol, "an RPC message is invalid: " + what);
}

template <class T>
T load(ByteView bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

ByteView take(ByteView& bytes, size_t count) {
  const ByteView taken = bytes.first(count);
  bytes = bytes.subspan(count);
  return taken;
}

}  // namespace

// ---- writing

void BatchWriter::clear() { bytes_.assign(kBatchHeaderBytes, 0); }

void BatchWriter::put(const void* data, size_t bytes) {
  if (bytes == 0) return;
  const auto* const from = static_cast<const uint8_t*>(data);
  bytes_.insert(bytes_.end(), from, from + bytes);
}

bool BatchWriter::add(MessageHeader header, std::string_view name, const Message& message,
                      std::vector<Buffer>& long_parts) {
  header.name_bytes = static_cast<uint16_t>(name.size());
  header.segments = static_cast<uint32_t>(message.segments.size());
  header.head_bytes = message.head.size();
  const size_t longest = kMessageHeaderBytes + name.size() + message.segments.size() * sizeof(uint64_t) + kMaxInlineSum;
  if (!empty() && bytes_.size() + longest > kMaxBatchBytes) return false;
  put(&header, sizeof header);
  put(name.data(), name.size());
  for (const Buffer& segment : message.segments) {
    const uint64_t bytes = segment.size();
    put(&bytes, sizeof bytes);
  }
  InlineRule rule;
  if (rule.is_inline(message.head.size())) {
    put(message.head.data(), message.head.size());
  } else {
    long_parts.push_back(Buffer::copy_of(message.head));
  }
  for (const Buffer& segment : message.segments) {
    if (rule.is_inline(segment.size())) {
      put(segment.data(), segment.size());
    } else {
      long_parts.push_back(segment);
    }
  }
  return true;
}

Bytes BatchWriter::take(Bytes reuse) {
  const auto bytes = static_cast<uint32_t>(bytes_.size() - kBatchHeaderBytes);
  std::memcpy(bytes_.data(), &bytes, sizeof bytes);
  std::swap(bytes_, reuse);
  clear();
  return reuse;
}

// ---- parsing

Result<size_t> parse_batch_header(ByteView header) {
  const auto bytes = load<uint32_t>(header);
  const auto zero = load<uint32_t>(header.subspan(4));
  if (bytes < kMessageHeaderBytes || bytes > kMaxBatchBytes || zero != 0) {
    return invalid(fmt::format("a batch of {} bytes", bytes));
  }
  return bytes;
}

Result<ParsedMessage> parse_message(ByteView& batch, uint64_t max_bytes) {
  if (batch.size() < kMessageHeaderBytes) return invalid("its header is cut off");
  ParsedMessage parsed;
  parsed.header = load<MessageHeader>(take(batch, kMessageHeaderBytes));
  const MessageHeader& header = parsed.header;
  if (!is_kind(header.kind)) return invalid(fmt::format("kind {}", static_cast<int>(header.kind)));
  if (header.kind == Kind::kRequest && (header.flags & ~kAllFlags) != 0) {
    return invalid(fmt::format("flags {}", header.flags));
  }
  if (header.name_bytes > kMaxNameBytes || header.segments > kMaxSegments) {
    return invalid(fmt::format("a name of {} bytes and {} segments", header.name_bytes, header.segments));
  }
  const size_t table_bytes = header.segments * sizeof(uint64_t);
  if (batch.size() < header.name_bytes + table_bytes) return invalid("its table is cut off");
  const ByteView name = take(batch, header.name_bytes);
  parsed.name = {reinterpret_cast<const char*>(name.data()), name.size()};
  ByteView table = take(batch, table_bytes);

  InlineRule rule;
  uint64_t sum = 0;
  parsed.message.segments.reserve(header.segments);
  for (size_t part = 0; part <= header.segments; ++part) {
    const uint64_t bytes = part == 0 ? header.head_bytes : load<uint64_t>(take(table, sizeof(uint64_t)));
    if (bytes > max_bytes - sum) return invalid(fmt::format("more than {} bytes", max_bytes));
    sum += bytes;
    const bool is_inline = rule.is_inline(bytes);
    if (is_inline && batch.size() < bytes) return invalid("it is cut off");
    const ByteView data = is_inline ? take(batch, bytes) : ByteView();
    if (part == 0) {
      parsed.message.head.assign(data.begin(), data.end());
    } else {
      parsed.message.segments.push_back(is_inline ? Buffer::copy_of(data) : Buffer());
    }
    if (!is_inline) parsed.long_parts.emplace_back(part == 0 ? ParsedMessage::kHeadPart : part - 1, bytes);
  }
  if (!parsed.long_parts.empty() && !batch.empty()) return invalid("long parts before the end of a batch");
  parsed.footprint = sum + header.segments * kSegmentOverhead;
  return parsed;
}

// ---- errors

namespace {

constexpr size_t kMaxErrorText = kMaxInlineBytes / 4;

/// True if a UTF-8 character begins at this place, or the text ends there.
bool is_boundary(std::string_view text, size_t place) {
  return place >= text.size() || (static_cast<uint8_t>(text[place]) & 0xc0) != 0x80;
}

std::string_view beginning_of(std::string_view text) {
  size_t end = std::min(text.size(), kMaxErrorText);
  while (end > 0 && !is_boundary(text, end)) --end;
  return text.substr(0, end);
}

std::string_view end_of(std::string_view text) {
  size_t begin = text.size() - std::min(text.size(), kMaxErrorText);
  while (!is_boundary(text, begin)) ++begin;
  return text.substr(begin);
}

}  // namespace

Message encode_error(const CallError& error) {
  Writer out;
  out.put(error.error.code).put_string(beginning_of(error.error.message)).put_string(beginning_of(error.type));
  out.put_string(end_of(error.traceback));  // it says more than the beginning
  return Message{out.take(), {}};
}

Result<CallError> parse_error(const Message& message) {
  Reader in(message.head);
  CallError error;
  MUSTER_ASSIGN(error.error.code, in.get<ErrorCode>());
  if (error.error.code > kLastErrorCode) error.error.code = ErrorCode::kInternal;
  MUSTER_ASSIGN(error.error.message, in.get_string());
  MUSTER_ASSIGN(error.type, in.get_string());
  MUSTER_ASSIGN(error.traceback, in.get_string());
  MUSTER_TRY(in.finish());
  return error;
}

Result<> check_message(std::string_view name, const Message& message, uint64_t max_bytes) {
  if (name.empty() || name.size() > kMaxNameBytes) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("a name must have 1 to {} bytes, got {}", kMaxNameBytes, name.size()));
  }
  if (message.segments.size() > kMaxSegments) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("a message has at most {} segments, got {}: join small tensors", kMaxSegments,
                            message.segments.size()));
  }
  if (message.bytes() > max_bytes) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("a message of {} is over the cap of {}",
                                                         format_bytes(message.bytes()), format_bytes(max_bytes)));
  }
  return {};
}

}  // namespace muster::rpc
