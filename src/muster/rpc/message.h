#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "muster/base/bytes.h"

namespace muster::rpc {

/// Shared memory of one process: the bytes of a tensor, for example. Copies refer to the same bytes.
class Buffer {
 public:
  Buffer() = default;
  /// Refers to memory that `owner` keeps alive.
  Buffer(std::shared_ptr<void> owner, void* data, size_t bytes)
      : owner_(std::move(owner)), data_(static_cast<uint8_t*>(data)), bytes_(bytes) {}
  /// Memory of its own, aligned to 64 bytes and not cleared. The memory of large ones, from 4 MiB on, is kept for the
  /// next ones: at most 256 MiB in a process, which the kernel may take if it needs memory.
  static Buffer allocate(size_t bytes);
  static Buffer copy_of(ByteView bytes);

  uint8_t* data() const { return data_; }
  size_t size() const { return bytes_; }
  ByteView view() const { return {data_, bytes_}; }

 private:
  std::shared_ptr<void> owner_;
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

/// What a segment counts for in a window beside its bytes: the memory that a short one needs.
inline constexpr size_t kSegmentOverhead = 128;

/// The arguments or the result of a call. This layer does not look inside. `segments` are sent from where they are, so
/// their memory must not change until the call has ended. If the call timed out or was canceled, it must not change
/// until the owner of the buffer has been released, because the bytes may still be on their way.
struct Message {
  Bytes head;
  std::vector<Buffer> segments;

  size_t bytes() const {
    size_t sum = head.size();
    for (const Buffer& segment : segments) sum += segment.size();
    return sum;
  }
  /// What the message counts for in a window.
  size_t footprint() const { return bytes() + segments.size() * kSegmentOverhead; }
};

}  // namespace muster::rpc
