#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "muster/base/error.h"

namespace muster {

using Bytes = std::vector<uint8_t>;
using ByteView = std::span<const uint8_t>;
using MutableByteView = std::span<uint8_t>;

inline ByteView as_bytes(std::string_view text) { return {reinterpret_cast<const uint8_t*>(text.data()), text.size()}; }
inline Bytes to_bytes(std::string_view text) { return {text.begin(), text.end()}; }
inline std::string to_string(ByteView bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }
std::string to_hex(ByteView bytes);
Result<Bytes> from_hex(std::string_view text);

/// "1.5 MiB", "64 KiB", "8 B".
std::string format_bytes(uint64_t count);

/// Appends little-endian numbers and length-prefixed strings.
class Writer {
 public:
  template <class T>
  requires std::is_integral_v<T> || std::is_enum_v<T> Writer& put(T value) {
    const size_t at = out_.size();
    out_.resize(at + sizeof(T));
    std::memcpy(out_.data() + at, &value, sizeof(T));  // every supported machine is little-endian
    return *this;
  }
  /// uint32 length, then the bytes.
  Writer& put_bytes(ByteView bytes);
  Writer& put_string(std::string_view text) { return put_bytes(as_bytes(text)); }
  Writer& put_raw(ByteView bytes);
  Bytes take() { return std::move(out_); }
  const Bytes& bytes() const { return out_; }

 private:
  Bytes out_;
};

/// Reads the format of Writer from untrusted bytes: every read is bounded and can fail. The views that it returns point
/// into these bytes.
class Reader {
 public:
  explicit Reader(ByteView bytes) : rest_(bytes) {}

  template <class T>
  requires std::is_integral_v<T> || std::is_enum_v<T> Result<T> get() {
    if (rest_.size() < sizeof(T)) return truncated(sizeof(T));
    T value;
    std::memcpy(&value, rest_.data(), sizeof(T));
    rest_ = rest_.subspan(sizeof(T));
    return value;
  }
  Result<ByteView> get_bytes();
  Result<std::string> get_string();
  Result<ByteView> get_raw(size_t count);
  size_t remaining() const { return rest_.size(); }
  /// An error unless everything was read.
  Result<> finish() const;

 private:
  tl::unexpected<Error> truncated(size_t wanted) const;
  ByteView rest_;
};

}  // namespace muster
