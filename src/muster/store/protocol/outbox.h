#pragma once

#include "muster/base/bytes.h"
#include "muster/io/stream.h"

namespace muster {

/// The largest capacity (bytes) that a client's empty buffer keeps. It is small, because most clients are idle.
inline constexpr size_t kKeptCapacity = 512;

/// Bytes that wait to be written to a stream, which may not accept all of them at once. Not thread-safe.
class Outbox {
 public:
  /// The caller appends its output here.
  Bytes& tail() { return bytes_; }
  size_t size() const { return bytes_.size() - sent_; }
  bool empty() const { return size() == 0; }
  /// Total bytes that the stream has accepted.
  uint64_t taken() const { return taken_; }
  /// Writes until the stream accepts no more bytes.
  Result<> flush(Stream& stream);

 private:
  Bytes bytes_;
  size_t sent_ = 0;
  uint64_t taken_ = 0;
};

}  // namespace muster
