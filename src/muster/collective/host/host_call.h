#pragma once

#include <algorithm>

#include "muster/collective/host/host_forms.h"
#include "muster/collective/operation.h"
#include "muster/shm/host_comm.h"

namespace muster {

/// What the shared-memory forms have in common: one rank's run of one collective, and the moves that it is made of. The
/// forms themselves are functions of it, a file for each pair that mirrors each other.
struct HostCall {
  HostCall(HostComm& on, const Operation& what, const Deadline& until)
      : comm(on),
        operation(what),
        call(what.call),
        deadline(until),
        rank(on.rank()),
        size(on.size()),
        element(size_of(what.call.dtype)) {}

  /// The next step, with area(bytes) ready to be written.
  Result<> begin(size_t bytes) {
    comm.next();
    return reserve(bytes);
  }
  Result<> reserve(size_t bytes) {
    return bytes <= kStepPayload ? comm.reserve_payload(deadline) : comm.reserve(deadline);
  }
  /// Where `bytes` of the current step go: the payload, if they fit, or the slot. Peers read them in the same place.
  uint8_t* area(size_t bytes) { return bytes <= kStepPayload ? comm.payload() : comm.slot(); }
  const uint8_t* area(Rank peer, uint32_t step, size_t bytes) {
    return bytes <= kStepPayload ? comm.payload(peer, step) : comm.slot(peer, step);
  }
  /// Bytes of the chunks in which blocks of up to `largest` bytes go; not zero.
  size_t chunk_of(size_t largest) const { return muster::chunk_of(largest, comm.slot_bytes(), element); }

  /// Input from `offset` on; for kPremulSum times the factor.
  void read_in(size_t offset, void* to, size_t bytes) const;
  /// Whether the own input can be an operand where it lies: else it goes through the slot as the peers' does.
  bool own_in_place() const { return operation.input.contiguous() && call.op != ReduceOp::kPremulSum; }
  /// All ranks' operands, of `bytes` bytes each, combined in rank order.
  void combine(void* out, const void* const* sources, size_t bytes) const;
  /// The same into the output from `offset` on. Moves the pointers.
  void combine_out(size_t offset, const void** sources, size_t bytes) const;
  /// Bytes of the input into the output; nothing where they are the same memory.
  void copy_own(size_t from, size_t to, size_t bytes) const;

  HostComm& comm;
  const Operation& operation;
  const Call& call;
  const Deadline& deadline;
  const Rank rank;
  const int size;
  const size_t element;
};

/// The ranks' blocks within the memory that holds all of them, in bytes. Made in every call, so it allocates nothing.
class HostBlocks {
 public:
  /// Equal ones of `bytes`, or those of `counts`.
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

/// Bytes of chunk `index` of a block that is cut into chunks of `chunk` bytes; zero behind its end.
inline size_t chunk_bytes(size_t block, size_t index, size_t chunk) {
  return block <= index * chunk ? 0 : std::min(chunk, block - index * chunk);
}

Result<> host_all_reduce(HostCall& run);
Result<> host_reduce(HostCall& run);
Result<> host_reduce_scatter(HostCall& run);
Result<> host_broadcast(HostCall& run);
Result<> host_scatter(HostCall& run);
Result<> host_all_gather(HostCall& run);
Result<> host_gather(HostCall& run);
Result<> host_all_to_all(HostCall& run);
Result<> host_barrier(HostCall& run);

/// The collective on the tensors themselves, each byte moved once, if all that matter lie in arenas; else false, and
/// nothing has been done but to find that out. Asked by all ranks alike.
Result<bool> run_on_shared_tensors(HostCall& run);

}  // namespace muster
