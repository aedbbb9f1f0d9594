#pragma once

#include <sys/uio.h>

#include <span>
#include <vector>

#include "muster/transport/link.h"

namespace muster {

/// A pending send or receive: the caller's bytes that have not moved yet, and the completion.
class Transfer {
 public:
  template <class AnySegment>
  Transfer(std::span<const AnySegment> segments, Completion completion) : completion_(std::move(completion)) {
    for (const AnySegment& segment : segments) {
      if (segment.bytes == 0) continue;
      const iovec piece{const_cast<void*>(static_cast<const void*>(segment.data)), segment.bytes};
      if (remaining_ == 0) {
        current_ = piece;
      } else {
        rest_.push_back(piece);
      }
      remaining_ += segment.bytes;
    }
  }

  size_t remaining() const { return remaining_; }
  Completion take_completion() { return std::move(completion_); }

  /// Writes the next pieces to `out`, at most `max_bytes` bytes. Returns the number of pieces.
  size_t describe(std::span<iovec> out, size_t max_bytes) const;
  void advance(size_t bytes);
  /// Copies the next `bytes` out of (a send) or into (a receive) the caller's segments.
  void copy_to(void* destination, size_t bytes);
  void copy_from(const void* source, size_t bytes);

 private:
  template <class Copy>
  void for_each_piece(size_t bytes, Copy&& copy);

  iovec current_{};
  std::vector<iovec> rest_;  // empty for the usual single segment
  size_t next_ = 0;
  size_t remaining_ = 0;
  Completion completion_;
};

}  // namespace muster
