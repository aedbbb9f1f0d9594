#pragma once

#include <algorithm>

#include "muster/collective/host/host_forms.h"
#include "muster/collective/operation.h"
#include "muster/shm/host_comm.h"

namespace muster {

/// One rank's run of one collective in shared memory, and the operations that the forms are made of. A form is a
/// function of a HostCall.
struct HostCall {
  HostComm& comm;
  const Operation& operation;
  const Deadline& deadline;
  const Call& call = operation.call;
  const Rank rank = comm.rank();
  const int size = comm.size();
  const size_t element = size_of(call.dtype);

  /// Advances to the next step, and waits until area(bytes) may be written.
  Result<> begin(size_t bytes) {
    comm.next();
    return reserve(bytes);
  }
  Result<> reserve(size_t bytes) {
    return bytes <= kStepPayload ? comm.reserve_payload(deadline) : comm.reserve(deadline);
  }
  /// The memory for `bytes` of the current step: the payload if they fit, else the slot. Peers read the same memory.
  uint8_t* area(size_t bytes) { return bytes <= kStepPayload ? comm.payload() : comm.slot(); }
  const uint8_t* area(Rank peer, uint32_t step, size_t bytes) {
    return bytes <= kStepPayload ? comm.payload(peer, step) : comm.slot(peer, step);
  }
  /// Bytes of a chunk, for blocks of up to `largest` bytes; not zero.
  size_t chunk_of(size_t largest) const { return muster::chunk_of(largest, comm.slot_bytes(), element); }

  Result<> wait_for_input(size_t end) const { return operation.wait_for_input(end, deadline); }
  Result<> output_is_complete(size_t end) const {
    return operation.staging != nullptr ? operation.staging->output_is_complete(end) : Result<>{};
  }

  /// Copies the input at `offset` to `to`. For kPremulSum, multiplies it by the factor.
  void read_in(size_t offset, void* to, size_t bytes) const;
  /// True if the own input can be an operand in place. If not, it goes through the slot like the peers' input.
  bool own_in_place() const { return operation.input.contiguous() && call.op != ReduceOp::kPremulSum; }
  /// Combines all ranks' operands, of `bytes` bytes each, in rank order.
  void combine(void* out, const void* const* sources, size_t bytes) const;
  /// Like combine(), into the output at `offset`. Advances the pointers in `sources`.
  void combine_out(size_t offset, const void** sources, size_t bytes) const;
  /// Copies bytes of the input to the output, unless they are the same memory.
  void copy_own(size_t from, size_t to, size_t bytes) const;
};

/// The ranks' blocks in a buffer, in bytes. It does not allocate, because every call makes one.
class HostBlocks {
 public:
  /// Equal blocks of `bytes`, or blocks of `counts` elements.
  HostBlocks(size_t bytes, const std::vector<size_t>& counts, size_t element)
      : bytes_(bytes), counts_(counts), element_(element) {}
  size_t bytes(Rank rank) const { return counts_.empty() ? bytes_ : counts_[rank] * element_; }
  size_t begin(Rank rank) const {
    if (counts_.empty()) return rank * bytes_;
    size_t before = 0;
    for (Rank peer = 0; peer < rank; ++peer) before += counts_[peer];
    return before * element_;
  }
  size_t largest() const {
    return counts_.empty() ? bytes_ : *std::max_element(counts_.begin(), counts_.end()) * element_;
  }

 private:
  size_t bytes_;
  const std::vector<size_t>& counts_;
  size_t element_;
};

/// Bytes of chunk `index` of a block that is cut into chunks of `chunk` bytes; zero after its end.
inline size_t chunk_bytes(size_t block, size_t index, size_t chunk) {
  return block <= index * chunk ? 0 : std::min(chunk, block - index * chunk);
}

Result<> host_all_reduce(HostCall& run);  ///< all_reduce and reduce
Result<> host_reduce_scatter(HostCall& run);
Result<> host_broadcast(HostCall& run);
Result<> host_scatter(HostCall& run);
Result<> host_all_gather(HostCall& run);
Result<> host_gather(HostCall& run);
Result<> host_all_to_all(HostCall& run);
Result<> host_barrier(HostCall& run);

/// Runs the collective directly on the tensors, moving each byte once, if all needed tensors lie in arenas. Otherwise
/// returns false and has changed nothing. All ranks must call it, or none.
Result<bool> run_on_shared_tensors(HostCall& run);

}  // namespace muster
