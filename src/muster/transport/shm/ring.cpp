#include "muster/transport/shm/ring.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>

#include "muster/shm/cpu_migrator.h"

namespace muster {
namespace {

constexpr size_t kControlBytes = 4096;
constexpr size_t kRegionBytes = 2 * kControlBytes + 2 * kRingBytes;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
/// The most bytes that one call moves, so that one end copies in while the other end copies out.
constexpr size_t kSlice = size_t{128} << 10;

static_assert(sizeof(RingControl) <= kControlBytes);

/// Bytes from `position` to the end of the ring's memory.
size_t until_end(uint64_t position) { return kRingBytes - position % kRingBytes; }

}  // namespace

Result<RingRegion> RingRegion::create(Fd& fd) {
  MUSTER_TRY(check_file_limit(kRegionBytes));
  fd.reset(memfd_create("muster-link", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return fail_errno(errno, "cannot create shared memory for a link");
  if (ftruncate(fd.get(), kRegionBytes) != 0 || fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
    return fail_errno(errno, "cannot size shared memory for a link");
  }
  return map(fd);  // a new memfd is zero, and so is the state of an empty ring
}

Result<RingRegion> RingRegion::open(const Fd& fd) {
  const auto status = status_if_sealed(fd);
  if (!status || status->st_size != static_cast<off_t>(kRegionBytes)) {
    return fail(ErrorCode::kProtocol, "the descriptor that the peer sent is not the shared memory of a link");
  }
  return map(fd);
}

Result<RingRegion> RingRegion::map(const Fd& fd) {
  MappedMemory memory = map_memory(fd, kRegionBytes);
  if (!memory) return fail_errno(errno, "cannot map shared memory for a link");
  return RingRegion(std::move(memory));
}

RingControl& RingRegion::control(int direction) const {
  return *reinterpret_cast<RingControl*>(memory_.get() + direction * kControlBytes);
}

uint8_t* RingRegion::data(int direction) const { return memory_.get() + 2 * kControlBytes + direction * kRingBytes; }

Result<size_t> RingWriter::move(Transfer& transfer) {
  const uint64_t used = tail_ - control_->head.load();
  if (used > kRingBytes) return fail(ErrorCode::kProtocol, "the reader of a shared ring is ahead of its writer");
  const size_t bytes = std::min({kRingBytes - used, transfer.remaining(), kSlice});
  if (bytes == 0) return 0;
  const size_t first = std::min(bytes, until_end(tail_));
  transfer.copy_to(data_ + tail_ % kRingBytes, first);
  transfer.copy_to(data_, bytes - first);
  tail_ += bytes;
  control_->writer_core.store(CpuMigrator::current(), std::memory_order_relaxed);
  control_->tail.store(tail_);
  return bytes;
}

Result<size_t> RingReader::move(Transfer& transfer) {
  const uint64_t ready = control_->tail.load() - head_;
  if (ready > kRingBytes) return fail(ErrorCode::kProtocol, "the writer of a shared ring overran its reader");
  const size_t bytes = std::min({size_t{ready}, transfer.remaining(), kSlice});
  if (bytes == 0) return 0;
  const size_t first = std::min(bytes, until_end(head_));
  transfer.copy_from(data_ + head_ % kRingBytes, first);
  transfer.copy_from(data_, bytes - first);
  head_ += bytes;
  control_->head.store(head_);
  return bytes;
}

}  // namespace muster
