#include "muster/base/bytes.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>
#include <charconv>

namespace muster {

static_assert(std::endian::native == std::endian::little, "the wire formats assume a little-endian machine");

std::string to_hex(ByteView bytes) { return fmt::format("{:02x}", fmt::join(bytes, "")); }

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
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  return fmt::format("{:.4g} {}", value, kUnits[unit]);
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
