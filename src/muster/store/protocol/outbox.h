#pragma once

#include "muster/base/bytes.h"
#include "muster/io/stream.h"

namespace muster {

/// The capacity that the buffer of an idle client may keep: most clients are idle.
inline constexpr size_t kKeptCapacity = 512;

/// Bytes on their way to a stream that may not take them all at once. Not thread-safe.
class Outbox {
 public:
  /// Append output here.
  Bytes& tail() { return bytes_; }
  size_t size() const { return bytes_.size() - sent_; }
  bool empty() const { return size() == 0; }
  /// Total bytes that the stream has taken.
  uint64_t taken() const { return taken_; }
  /// Writes until the stream takes no more.
  Result<> flush(Stream& stream);

 private:
  Bytes bytes_;
  size_t sent_ = 0;
  uint64_t taken_ = 0;
};

}  // namespace muster
