#pragma once

#include <atomic>

#include "muster/io/fd.h"
#include "muster/transport/transfer.h"

namespace muster {

/// The shared part of a ring of bytes with one writer and one reader, in two processes. Positions count bytes since the
/// beginning and never wrap. The writer owns tail and its flag's meaning, the reader head: each on its own cache line.
struct RingControl {
  alignas(64) std::atomic<uint64_t> tail;
  std::atomic<uint32_t> writer_core;  ///< on which it wrote last; beside tail, for both are read together
  alignas(64) std::atomic<uint64_t> head;
  alignas(64) std::atomic<uint32_t> reader_parked;
  alignas(64) std::atomic<uint32_t> writer_parked;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

inline constexpr size_t kRingBytes = size_t{1} << 20;

/// Memory that two processes share, with a ring for each direction. It has no name anywhere.
class RingRegion {
 public:
  /// Makes one; `fd` is what the other process maps.
  static Result<RingRegion> create(Fd& fd);
  /// Maps another process's. kProtocol unless its size is right and sealed: one that shrank would kill this process.
  static Result<RingRegion> open(const Fd& fd);
  RingRegion(RingRegion&& other) noexcept : base_(std::exchange(other.base_, nullptr)) {}
  RingRegion& operator=(RingRegion&&) = delete;
  ~RingRegion();

  RingControl& control(int direction) const;
  uint8_t* data(int direction) const;

 private:
  explicit RingRegion(void* base) : base_(base) {}
  static Result<RingRegion> map(const Fd& fd);
  void* base_;
};

/// One process's end of a ring. What it did itself it knows itself; what the other end says is checked against that.
class RingWriter {
 public:
  RingWriter(const RingRegion& region, int direction)
      : control_(&region.control(direction)), data_(region.data(direction)) {}
  /// Takes what fits now; the number of bytes, or kProtocol when the reader claims more than was written.
  Result<size_t> write(Transfer& operation);
  /// Whether the reader sleeps and has to be told; asks only once.
  bool claim_wake() { return claim(control_->reader_parked); }
  /// Asks the reader to tell when there is room.
  void park(bool parked);
  bool parked() const { return parked_; }

 private:
  friend class RingReader;
  static bool claim(std::atomic<uint32_t>& flag) { return flag.load() != 0 && flag.exchange(0) != 0; }

  RingControl* control_;
  uint8_t* data_;
  uint64_t tail_ = 0;
  bool parked_ = false;
};

class RingReader {
 public:
  RingReader(const RingRegion& region, int direction)
      : control_(&region.control(direction)), data_(region.data(direction)) {}
  /// Gives what is there; kProtocol when the writer claims more than fits.
  Result<size_t> read(Transfer& operation);
  bool has_bytes() const { return control_->tail.load() != head_; }
  uint32_t writer_core() const { return control_->writer_core.load(std::memory_order_relaxed); }
  bool claim_wake() { return RingWriter::claim(control_->writer_parked); }
  void park(bool parked);
  bool parked() const { return parked_; }

 private:
  RingControl* control_;
  const uint8_t* data_;
  uint64_t head_ = 0;
  bool parked_ = false;
};

}  // namespace muster
