#pragma once

#include <atomic>

#include "muster/shm/memory_file.h"
#include "muster/transport/transfer.h"

namespace muster {

// A ring of bytes with one writer and one reader, in two processes. Positions count bytes since the beginning and never
// wrap; position p lies at index p % kRingBytes.
//
// Invariants: head <= tail <= head + kRingBytes. Only the writer stores `tail`, only the reader stores `head`. The
// bytes [head, tail) belong to the reader, all others to the writer. Each end keeps its own position in its process,
// and checks the other end's position against it: the other process may be broken.
//
// Memory order. All loads and stores of positions and parked flags are sequentially consistent:
// - tail: the writer stores it after it has copied bytes in. The reader loads it before it copies them out. Release and
//   acquire would suffice for that. For `head`, the two ends change roles.
// - reader_parked: the reader stores 1 and then loads `tail` once more. The writer stores `tail` and then loads
//   reader_parked. Each stores one word and then loads the other one, so both must be in one total order (Dekker):
//   either the reader finds the new bytes, or the writer finds the flag and sends a doorbell. For writer_parked and
//   `head`, the two ends change roles. The other end clears a flag by exchange, so there is one doorbell for each park.
// - writer_core: relaxed, a hint. The writer stores it before `tail`.
struct RingControl {
  alignas(64) std::atomic<uint64_t> tail;
  std::atomic<uint32_t> writer_core;  ///< on which it last wrote; beside tail, because the reader loads both
  alignas(64) std::atomic<uint64_t> head;
  alignas(64) std::atomic<uint32_t> reader_parked;
  alignas(64) std::atomic<uint32_t> writer_parked;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

inline constexpr size_t kRingBytes = size_t{1} << 20;

/// Memory that two processes share, with a ring for each direction. It has no name.
class RingRegion {
 public:
  /// Creates a region. The other process maps `fd`.
  static Result<RingRegion> create(Fd& fd);
  /// Maps a region of another process. kProtocol unless its size is right and sealed: access beyond the end of memory
  /// that shrank would be a SIGBUS.
  static Result<RingRegion> open(const Fd& fd);

  RingControl& control(int direction) const;
  uint8_t* data(int direction) const;

 private:
  explicit RingRegion(MappedMemory memory) : memory_(std::move(memory)) {}
  static Result<RingRegion> map(const Fd& fd);
  MappedMemory memory_;
};

/// Base class of the two ends of a ring. An end that sleeps asks the other one to wake it.
class RingEnd {
 public:
  /// True if the other end sleeps and must be woken. True once for each time that it parks.
  bool claim_wake() { return other_parked_->load() != 0 && other_parked_->exchange(0) != 0; }
  /// Asks the other end for a wake-up, or withdraws the request.
  void park(bool parked) {
    if (parked != parked_) own_parked_->store(parked ? 1 : 0);
    parked_ = parked;
  }
  bool parked() const { return parked_; }

 protected:
  RingEnd(const RingRegion& region, int direction, bool writes)
      : control_(&region.control(direction)),
        data_(region.data(direction)),
        own_parked_(writes ? &control_->writer_parked : &control_->reader_parked),
        other_parked_(writes ? &control_->reader_parked : &control_->writer_parked) {}
  RingControl* control_;
  uint8_t* data_;

 private:
  std::atomic<uint32_t>* own_parked_;
  std::atomic<uint32_t>* other_parked_;
  bool parked_ = false;
};

class RingWriter : public RingEnd {
 public:
  RingWriter(const RingRegion& region, int direction) : RingEnd(region, direction, true) {}
  /// Copies the bytes that fit now. Returns their number, or kProtocol if the reader claims more than was written.
  Result<size_t> move(Transfer& operation);
  /// For a thread that is about to migrate. The next move() tells the reader the new core.
  void forget_core() { control_->writer_core.store(UINT32_MAX, std::memory_order_relaxed); }

 private:
  uint64_t tail_ = 0;
};

class RingReader : public RingEnd {
 public:
  RingReader(const RingRegion& region, int direction) : RingEnd(region, direction, false) {}
  /// Delivers the bytes that are there. Returns their number, or kProtocol if the writer claims more than fits.
  Result<size_t> move(Transfer& operation);
  bool has_bytes() const { return control_->tail.load() != head_; }
  uint32_t writer_core() const { return control_->writer_core.load(std::memory_order_relaxed); }

 private:
  uint64_t head_ = 0;
};

}  // namespace muster
