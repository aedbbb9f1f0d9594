#include "muster/base/bytes.h"

#include <fmt/format.h>

#include <bit>
#include <charconv>

namespace muster {

static_assert(std::endian::native == std::endian::little, "the wire formats assume a little-endian machine");

std::string to_hex(ByteView bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(bytes.size() * 2);
  for (const uint8_t byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

Result<Bytes> from_hex(std::string_view text) {
  if (text.size() % 2 != 0) return fail(ErrorCode::kInvalidArgument, "a hex string needs an even number of digits");
  Bytes bytes(text.size() / 2);
  for (size_t i = 0; i < bytes.size(); ++i) {
    const char* begin = text.data() + 2 * i;
    const auto [end, error] = std::from_chars(begin, begin + 2, bytes[i], 16);
    if (error != std::errc() || end != begin + 2) {
      return fail(ErrorCode::kInvalidArgument, fmt::format("'{}' is not hexadecimal", std::string_view(begin, 2)));
    }
  }
  return bytes;
}

std::string format_bytes(uint64_t count) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(count);
  int unit = 0;
  while (value >= 1024 && unit < 4) {
    value /= 1024;
    ++unit;
  }
  return fmt::format("{:.4g} {}", value, kUnits[unit]);
}

Result<uint64_t> parse_bytes(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  std::string_view suffix(end, text.data() + text.size() - end);
  if (suffix.ends_with('B')) suffix.remove_suffix(1);
  int shift = suffix.empty() ? 0 : suffix == "Ki" ? 10 : suffix == "Mi" ? 20 : suffix == "Gi" ? 30 : -1;
  if (error != std::errc() || shift < 0 || (value << shift) >> shift != value) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("'{}' is not a size; write 8, 64Ki, 1Mi or 2Gi", text));
  }
  return value << shift;
}

Writer& Writer::put_bytes(ByteView bytes) {
  put(static_cast<uint32_t>(bytes.size()));
  return put_raw(bytes);
}

Writer& Writer::put_raw(ByteView bytes) {
  out_.insert(out_.end(), bytes.begin(), bytes.end());
  return *this;
}

Result<ByteView> Reader::get_bytes() {
  MUSTER_ASSIGN(const auto length, get<uint32_t>());
  return get_raw(length);
}

Result<std::string> Reader::get_string() {
  MUSTER_ASSIGN(const auto bytes, get_bytes());
  return to_string(bytes);
}

Result<ByteView> Reader::get_raw(size_t count) {
  if (rest_.size() < count) return truncated(count);
  const ByteView bytes = rest_.first(count);
  rest_ = rest_.subspan(count);
  return bytes;
}

Result<> Reader::finish() const {
  if (!rest_.empty())
    return fail(ErrorCode::kProtocol, fmt::format("{} extra bytes at the end of a message", rest_.size()));
  return {};
}

tl::unexpected<Error> Reader::truncated(size_t wanted) const {
  return fail(ErrorCode::kProtocol,
              fmt::format("a message is truncated: {} bytes wanted, {} left", wanted, rest_.size()));
}

}  // namespace muster
