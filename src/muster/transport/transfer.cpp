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

template <class Copy>
void Transfer::for_each_piece(size_t bytes, Copy&& copy) {
  for (size_t done = 0; done < bytes;) {
    const size_t step = std::min(bytes - done, current_.iov_len);
    copy(static_cast<char*>(current_.iov_base), done, step);
    advance(step);
    done += step;
  }
}

void Transfer::copy_to(void* destination, size_t bytes) {
  for_each_piece(bytes, [&](const char* piece, size_t done, size_t step) {
    std::memcpy(static_cast<char*>(destination) + done, piece, step);
  });
}

void Transfer::copy_from(const void* source, size_t bytes) {
  for_each_piece(bytes, [&](char* piece, size_t done, size_t step) {
    std::memcpy(piece, static_cast<const char*>(source) + done, step);
  });
}

}  // namespace muster
