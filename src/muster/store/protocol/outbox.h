#pragma once

#include "muster/base/bytes.h"
#include "muster/io/stream.h"

namespace muster {

/// What an idle client's buffer may keep of its memory: most clients are idle.
inline constexpr size_t kKeptCapacity = 512;

/// Bytes on their way to a stream that may not take them all at once. Not thread-safe.
class Outbox {
 public:
  /// Append what is to be sent here.
  Bytes& tail() { return bytes_; }
  size_t size() const { return bytes_.size() - sent_; }
  bool empty() const { return size() == 0; }
  /// How many bytes the stream has taken so far, in all.
  uint64_t taken() const { return taken_; }
  /// Writes until the stream takes no more.
  Result<> flush(Stream& stream);

 private:
  Bytes bytes_;
  size_t sent_ = 0;
  uint64_t taken_ = 0;
};

}  // namespace muster
