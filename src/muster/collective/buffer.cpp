#include "muster/collective/buffer.h"

#include <algorithm>
#include <cstring>

#include "muster/base/check.h"

namespace muster {

BufferView::BufferView(const std::vector<Segment>& segments, Dtype dtype) : dtype_(dtype) {
  std::vector<LaterSegment> more;
  for (const Segment& segment : segments) {
    MUSTER_CHECK(segment.bytes % size_of(dtype) == 0, "a segment holds whole elements");
    if (segment.bytes == 0) continue;
    const bool is_first = bytes_ == 0;
    bytes_ += segment.bytes;
    if (is_first) {
      first_ = segment;
    } else {
      more.push_back({segment, bytes_});
    }
  }
  if (!more.empty()) more_ = std::make_shared<const std::vector<LaterSegment>>(std::move(more));
}

Segment BufferView::at(size_t offset, size_t limit) const {
  MUSTER_CHECK(offset < bytes_, "an offset lies within its buffer");
  const Segment* segment = &first_;
  size_t begin = 0;
  if (offset >= first_.bytes) {
    const auto later = std::upper_bound(more_->begin(), more_->end(), offset,
                                        [](size_t wanted, const LaterSegment& each) { return wanted < each.end; });
    segment = &later->segment;
    begin = later->end - segment->bytes;
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
