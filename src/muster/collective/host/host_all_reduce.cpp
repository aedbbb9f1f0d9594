// all_reduce and reduce. One shot: every rank reads and combines the data of all ranks. Through the leader: rank 0
// combines for all. Two shots: every rank combines its part of a chunk, and the others read the results.
#include "muster/collective/host/host_call.h"

namespace muster {
namespace {

bool is_root(const HostCall& run) { return run.call.collective == Collective::kAllReduce || run.rank == run.call.root; }

/// Waits for all ranks' data, if this rank needs it.
Result<> wait_for_operands(HostCall& run, uint32_t step) {
  if (run.call.collective == Collective::kAllReduce) return run.comm.wait_all(step, run.deadline);
  return is_root(run) ? run.comm.wait_each(step, run.deadline) : Result<>{};
}

Result<> put(HostCall& run, size_t index, size_t chunk) {
  MUSTER_TRY(run.begin(chunk));
  MUSTER_TRY(run.wait_for_input((index + 1) * chunk));
  run.read_in(index * chunk, run.area(chunk), chunk_bytes(run.call.bytes(), index, chunk));
  run.comm.publish();
  return {};
}

/// Combines all ranks' chunks of a step into the output.
void combine_all(HostCall& run, size_t index, size_t chunk, uint32_t step) {
  auto& sources = run.comm.pointers();
  for (Rank peer = 0; peer < run.size; ++peer) sources[peer] = run.area(peer, step, chunk);
  // Reads the own operand from the input, because the cache lines of the own slot and record are moving to other ranks.
  if (run.own_in_place()) sources[run.rank] = run.operation.input.data() + index * chunk;
  run.combine_out(index * chunk, sources.data(), chunk_bytes(run.call.bytes(), index, chunk));
}

/// Every rank that needs the result combines all of it.
Result<> one_shot(HostCall& run) {
  const size_t bytes = run.call.bytes(), chunk = run.chunk_of(bytes);
  const size_t chunks = chunk_count(bytes, chunk);
  MUSTER_TRY(put(run, 0, chunk));
  uint32_t step = run.comm.step();
  for (size_t index = 0; index < chunks; ++index, ++step) {
    if (index + 1 < chunks) MUSTER_TRY(put(run, index + 1, chunk));
    MUSTER_TRY(wait_for_operands(run, step));
    if (is_root(run)) combine_all(run, index, chunk, step);
  }
  return {};
}

/// Only for all_reduce. The leader combines for all ranks: n reads by one rank, instead of n reads by each of n ranks.
Result<> through_leader(HostCall& run) {
  const size_t bytes = run.call.bytes();
  MUSTER_TRY(put(run, 0, bytes));
  const uint32_t put_step = run.comm.step();
  const uint32_t step = run.comm.next();
  if (run.rank == 0) {
    MUSTER_TRY(run.comm.wait_each(put_step, run.deadline));
    combine_all(run, 0, bytes, put_step);
    MUSTER_TRY(run.reserve(bytes));
    run.operation.output.read(0, run.area(bytes), bytes);
    run.comm.publish();
    return {};
  }
  MUSTER_TRY(run.comm.wait(0, step, run.deadline));
  MUSTER_TRY(run.reserve(0));
  run.comm.publish();
  run.operation.output.write(0, run.area(0, step, bytes), bytes);
  return {};
}

/// Two shots, with one step for each chunk: the step of chunk k carries the input of chunk k and the results of chunk
/// k - 1. So there is one wait for a chunk, and a rank reads the results of k - 1 while others still combine chunk k.
class TwoShot {
 public:
  explicit TwoShot(HostCall& run)
      : run_(run),
        bytes_(run.call.bytes()),
        chunk_(two_shot_chunk(run.comm.slot_bytes(), run.size, run.element)),
        own_in_place_(run.own_in_place()) {}

  Result<> execute() {
    const size_t chunks = chunk_count(bytes_, chunk_);
    MUSTER_TRY(run_.begin(chunk_));
    const uint32_t first = run_.comm.step();
    MUSTER_TRY(put(0));
    run_.comm.publish();
    for (size_t index = 0; index < chunks; ++index) {
      const auto step = static_cast<uint32_t>(first + index);
      MUSTER_TRY(run_.comm.wait_all(step, run_.deadline));
      MUSTER_TRY(run_.begin(chunk_));
      combine_part(index, step);
      if (index + 1 < chunks) MUSTER_TRY(put(index + 1));
      run_.comm.publish();
      if (index > 0) MUSTER_TRY(take(index - 1, step));
    }
    const auto last = static_cast<uint32_t>(first + chunks);
    MUSTER_TRY(wait_for_operands(run_, last));
    return take(chunks - 1, last);
  }

 private:
  /// The offset of a rank's part in a chunk. Parts begin on cache lines.
  size_t part(Rank rank, size_t bytes) const {
    const size_t grain = std::max<size_t>(64, run_.element), grains = (bytes + grain - 1) / grain;
    return std::min(bytes, grains * rank / run_.size * grain);
  }
  uint8_t* result(uint8_t* slot) const { return slot + (chunk_ + 63) / 64 * 64; }
  const uint8_t* result(const uint8_t* slot) const { return slot + (chunk_ + 63) / 64 * 64; }

  /// Writes the parts that the other ranks combine. They read nothing else.
  Result<> put(size_t index) {
    const size_t bytes = chunk_bytes(bytes_, index, chunk_), offset = index * chunk_;
    MUSTER_TRY(run_.wait_for_input(offset + bytes));
    const size_t begin = own_in_place_ ? part(run_.rank, bytes) : bytes;
    const size_t end = own_in_place_ ? part(run_.rank + 1, bytes) : bytes;
    run_.read_in(offset, run_.comm.slot(), begin);
    run_.read_in(offset + end, run_.comm.slot() + end, bytes - end);
    return {};
  }

  /// Combines the own part of a chunk into the slot of the next step, and into the output of a rank that needs it.
  void combine_part(size_t index, uint32_t step) {
    const size_t bytes = chunk_bytes(bytes_, index, chunk_), begin = part(run_.rank, bytes);
    const size_t length = part(run_.rank + 1, bytes) - begin;
    auto& sources = run_.comm.pointers();
    for (Rank peer = 0; peer < run_.size; ++peer) sources[peer] = run_.comm.slot(peer, step) + begin;
    if (own_in_place_) sources[run_.rank] = run_.operation.input.data() + index * chunk_ + begin;
    uint8_t* const combined = result(run_.comm.slot());
    for (size_t done = 0; done < length; done += kCachedBytes) {
      const size_t here = std::min(kCachedBytes, length - done);
      run_.combine(combined + done, sources.data(), here);
      if (is_root(run_)) run_.operation.output.write(index * chunk_ + begin + done, combined + done, here);
      for (const void*& source : sources) source = static_cast<const uint8_t*>(source) + here;
    }
  }

  /// Copies the results of the other ranks' parts of a chunk, which are in the slots of `step`.
  Result<> take(size_t index, uint32_t step) {
    if (!is_root(run_)) return {};
    const size_t bytes = chunk_bytes(bytes_, index, chunk_);
    for (Rank turn = 1; turn < run_.size; ++turn) {
      const Rank peer = (run_.rank + turn) % run_.size;
      const size_t begin = part(peer, bytes), end = part(peer + 1, bytes);
      run_.operation.output.write(index * chunk_ + begin, result(run_.comm.slot(peer, step)), end - begin);
    }
    return run_.output_is_complete(index * chunk_ + bytes);
  }

  HostCall& run_;
  const size_t bytes_, chunk_;
  const bool own_in_place_;
};

}  // namespace

Result<> host_all_reduce(HostCall& run) {
  switch (reduce_form(run.call.collective, run.call.bytes(), run.size, run.comm.has_leader())) {
    case ReduceForm::kLeader:
      return through_leader(run);
    case ReduceForm::kOneShot:
      return one_shot(run);
    case ReduceForm::kTwoShots:
      break;
  }
  return TwoShot(run).execute();
}

}  // namespace muster
