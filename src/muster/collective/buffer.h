#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "muster/base/check.h"
#include "muster/base/dtype.h"
#include "muster/transport/link.h"

namespace muster {

/// Elements of one dtype in one or several segments: a tensor, a list of tensors, or all tensors of a coalesced call.
/// Byte offsets run through the segments in order. Does not own the memory. Segments hold whole elements and do not
/// overlap.
class BufferView {
 public:
  BufferView() = default;  ///< no elements
  BufferView(void* data, size_t count, Dtype dtype) : first_{data, count * size_of(dtype)}, dtype_(dtype) {
    bytes_ = first_.bytes;
  }
  BufferView(const std::vector<Segment>& segments, Dtype dtype);

  Dtype dtype() const { return dtype_; }
  size_t bytes() const { return bytes_; }
  size_t count() const { return bytes_ / size_of(dtype_); }
  /// True if all bytes lie in one segment; then data() is its start (null is possible without bytes).
  bool contiguous() const { return more_ == nullptr; }
  uint8_t* data() const { return static_cast<uint8_t*>(first_.data); }

  /// The contiguous memory at `offset`, at most `limit` bytes; offset < bytes().
  Segment at(size_t offset, size_t limit) const;
  /// Calls `body(uint8_t* data, size_t bytes)` for each contiguous part of [offset, offset + bytes), in order.
  template <class Body>
  void visit(size_t offset, size_t bytes, Body&& body) const {
    if (contiguous() && bytes > 0) {
      MUSTER_CHECK(offset + bytes <= bytes_, "a part lies within its buffer");
      return static_cast<void>(body(data() + offset, bytes));
    }
    for (const size_t end = offset + bytes; offset < end;) {
      const Segment stretch = at(offset, end - offset);
      body(static_cast<uint8_t*>(stretch.data), stretch.bytes);
      offset += stretch.bytes;
    }
  }
  /// read() copies the bytes at `offset` to `to`; write() copies `from` to the bytes at `offset`.
  void read(size_t offset, void* to, size_t bytes) const;
  void write(size_t offset, const void* from, size_t bytes) const;

 private:
  struct LaterSegment {
    Segment segment;
    size_t end;  ///< the offset of its end
  };

  Segment first_;
  /// The segments after the first one; null in most buffers. A shared_ptr, because copies share it; it never changes.
  std::shared_ptr<const std::vector<LaterSegment>> more_;
  size_t bytes_ = 0;
  Dtype dtype_ = Dtype::kUint8;
};

}  // namespace muster
