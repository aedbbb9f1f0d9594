#include "muster/store/protocol/outbox.h"

namespace muster {

Result<> Outbox::flush(Stream& stream) {
  while (!empty()) {
    const iovec segment{bytes_.data() + sent_, size()};
    MUSTER_ASSIGN(const size_t n, stream.write({&segment, 1}));
    if (n == 0) break;
    sent_ += n;
    taken_ += n;
  }
  if (empty()) {
    bytes_.clear();
    sent_ = 0;
    if (bytes_.capacity() > kKeptCapacity) Bytes().swap(bytes_);
  } else if (sent_ > bytes_.size() / 2) {  // only then, so that each byte moves about once
    bytes_.erase(bytes_.begin(), bytes_.begin() + static_cast<ptrdiff_t>(sent_));
    sent_ = 0;
  }
  return {};
}

}  // namespace muster
