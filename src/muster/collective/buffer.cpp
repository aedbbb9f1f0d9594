#include "muster/collective/buffer.h"

#include <algorithm>
#include <cstring>

#include "muster/base/check.h"

namespace muster {

BufferView::BufferView(std::vector<Segment> segments, Dtype dtype) : dtype_(dtype) {
  std::erase_if(segments, [](const Segment& segment) { return segment.bytes == 0; });
  if (segments.empty()) return;
  for (const Segment& segment : segments) {
    MUSTER_CHECK(segment.bytes % size_of(dtype) == 0, "a segment holds whole elements");
    bytes_ += segment.bytes;
    ends_.push_back(bytes_);
  }
  first_ = segments.front();
  segments.erase(segments.begin());
  ends_.erase(ends_.begin());
  more_ = std::move(segments);
}

Segment BufferView::at(size_t offset, size_t limit) const {
  MUSTER_CHECK(offset < bytes_, "an offset lies within its buffer");
  const Segment* segment = &first_;
  size_t begin = 0;
  if (offset >= first_.bytes) {
    const auto index = std::upper_bound(ends_.begin(), ends_.end(), offset) - ends_.begin();
    segment = &more_[index];
    begin = ends_[index] - segment->bytes;
  }
  return {static_cast<uint8_t*>(segment->data) + (offset - begin), std::min(limit, begin + segment->bytes - offset)};
}

void BufferView::read(size_t offset, void* to, size_t bytes) const {
  visit(offset, bytes, [&](const uint8_t* from, size_t here) {
    std::memcpy(to, from, here);
    to = static_cast<uint8_t*>(to) + here;
  });
}

void BufferView::write(size_t offset, const void* from, size_t bytes) const {
  visit(offset, bytes, [&](uint8_t* to, size_t here) {
    std::memcpy(to, from, here);
    from = static_cast<const uint8_t*>(from) + here;
  });
}

}  // namespace muster
