// all_gather and gather: every rank publishes its block in chunks.
#include "muster/collective/host/host_call.h"

namespace muster {
namespace {

Result<> put(HostCall& run, size_t block, size_t index, size_t chunk) {
  const size_t bytes = chunk_bytes(block, index, chunk);
  MUSTER_TRY(run.begin(chunk));
  run.operation.input.read(index * chunk, run.area(chunk), bytes);
  run.comm.publish();
  return {};
}

void take(HostCall& run, const HostBlocks& blocks, Rank peer, size_t index, size_t chunk, uint32_t step) {
  const size_t bytes = chunk_bytes(blocks.bytes(peer), index, chunk);
  run.operation.output.write(blocks.begin(peer) + index * chunk, run.area(peer, step, chunk), bytes);
}

/// Copies a chunk of the own block directly to the output.
void keep(HostCall& run, const HostBlocks& blocks, size_t index, size_t chunk) {
  const size_t bytes = chunk_bytes(blocks.bytes(run.rank), index, chunk);
  run.copy_own(index * chunk, blocks.begin(run.rank) + index * chunk, bytes);
}

}  // namespace

Result<> host_all_gather(HostCall& run) {
  const HostBlocks blocks(run.call.bytes(), run.operation.counts, run.element);
  const size_t block = blocks.bytes(run.rank), chunk = run.chunk_of(blocks.largest());
  const size_t chunks = chunk_count(blocks.largest(), chunk);
  MUSTER_TRY(put(run, block, 0, chunk));
  uint32_t step = run.comm.step();
  for (size_t index = 0; index < chunks; ++index, ++step) {
    keep(run, blocks, index, chunk);  // while it is in the cache
    if (index + 1 < chunks) MUSTER_TRY(put(run, block, index + 1, chunk));
    MUSTER_TRY(run.comm.wait_all(step, run.deadline));
    for (Rank turn = 1; turn < run.size; ++turn) take(run, blocks, (run.rank + turn) % run.size, index, chunk, step);
  }
  return {};
}

Result<> host_gather(HostCall& run) {
  const size_t block = run.call.bytes(), chunk = run.chunk_of(block);
  const HostBlocks blocks(block, run.operation.counts, run.element);
  const size_t chunks = chunk_count(block, chunk);
  for (size_t index = 0; index < chunks; ++index) {
    if (run.rank != run.call.root) {
      MUSTER_TRY(put(run, block, index, chunk));
      continue;
    }
    MUSTER_TRY(run.begin(0));
    run.comm.publish();  // before it waits, so that a rank with another root finds the mismatch
    keep(run, blocks, index, chunk);
    const uint32_t step = run.comm.step();
    MUSTER_TRY(run.comm.wait_each(step, run.deadline));
    for (Rank peer = 0; peer < run.size; ++peer) {
      if (peer != run.rank) take(run, blocks, peer, index, chunk, step);
    }
  }
  return {};
}

}  // namespace muster
