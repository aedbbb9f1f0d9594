#include "muster/transport/transfer.h"

#include <algorithm>
#include <cstring>

namespace muster {

size_t Transfer::describe(std::span<iovec> out, size_t max_bytes) const {
  size_t count = 0;
  const iovec* piece = &current_;
  for (size_t next = next_; count < out.size() && max_bytes > 0 && piece->iov_len > 0; ++next) {
    out[count] = {piece->iov_base, std::min(piece->iov_len, max_bytes)};
    max_bytes -= out[count++].iov_len;
    if (next == rest_.size()) break;
    piece = &rest_[next];
  }
  return count;
}

void Transfer::advance(size_t bytes) {
  remaining_ -= bytes;
  while (bytes > 0) {
    const size_t step = std::min(bytes, current_.iov_len);
    current_ = {static_cast<char*>(current_.iov_base) + step, current_.iov_len - step};
    bytes -= step;
    if (current_.iov_len == 0 && next_ < rest_.size()) current_ = rest_[next_++];
  }
}

void Transfer::copy_to(void* destination, size_t bytes) {
  auto* to = static_cast<char*>(destination);
  while (bytes > 0) {
    const size_t step = std::min(bytes, current_.iov_len);
    std::memcpy(to, current_.iov_base, step);
    advance(step);
    to += step;
    bytes -= step;
  }
}

void Transfer::copy_from(const void* source, size_t bytes) {
  const auto* from = static_cast<const char*>(source);
  while (bytes > 0) {
    const size_t step = std::min(bytes, current_.iov_len);
    std::memcpy(current_.iov_base, from, step);
    advance(step);
    from += step;
    bytes -= step;
  }
}

}  // namespace muster
