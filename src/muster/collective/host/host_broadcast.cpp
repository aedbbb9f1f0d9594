// broadcast and scatter: the root publishes chunks, as far ahead as its slots allow, and the other ranks read them.
#include "muster/collective/host/host_call.h"

namespace muster {
namespace {

/// The step of a receiver, which publishes it after it has seen the root's step. So the root's records tell all ranks
/// which step all have published, and no rank has to read the records of all others.
Result<uint32_t> receiver_step(HostCall& run) {
  const uint32_t step = run.comm.next();
  MUSTER_TRY(run.comm.wait(run.call.root, step, run.deadline));
  MUSTER_TRY(run.reserve(0));
  run.comm.publish();
  return step;
}

}  // namespace

Result<> host_broadcast(HostCall& run) {
  const size_t total = run.call.bytes(), chunk = run.chunk_of(total);
  const size_t chunks = chunk_count(total, chunk);
  for (size_t index = 0; index < chunks; ++index) {
    const size_t bytes = chunk_bytes(total, index, chunk);
    if (run.rank == run.call.root) {
      MUSTER_TRY(run.begin(chunk));
      run.operation.input.read(index * chunk, run.area(chunk), bytes);
      run.comm.publish();
      run.comm.fetch_ahead();
    } else {
      MUSTER_ASSIGN(const uint32_t step, receiver_step(run));
      run.operation.output.write(index * chunk, run.area(run.call.root, step, chunk), bytes);
    }
  }
  return {};
}

Result<> host_scatter(HostCall& run) {
  const size_t block = run.call.bytes();
  const size_t room = piece_room(run.comm.slot_bytes(), run.size, run.element);
  const size_t piece = std::min(room, std::max(block, size_t{1}));
  const size_t chunks = chunk_count(block, piece), all = piece * run.size;
  for (size_t index = 0; index < chunks; ++index) {
    const size_t bytes = chunk_bytes(block, index, piece);
    if (run.rank != run.call.root) {
      MUSTER_ASSIGN(const uint32_t step, receiver_step(run));
      run.operation.output.write(index * piece, run.area(run.call.root, step, all) + run.rank * piece, bytes);
      continue;
    }
    MUSTER_TRY(run.begin(all));
    for (Rank peer = 0; peer < run.size; ++peer) {
      if (peer == run.rank) continue;
      run.operation.input.read(peer * block + index * piece, run.area(all) + peer * piece, bytes);
    }
    run.comm.publish();
    run.copy_own(run.rank * block + index * piece, index * piece, bytes);
  }
  return {};
}

}  // namespace muster
