// reduce_scatter and all_to_all: every rank publishes a piece for every other rank, and reads its piece from each. A
// rank's own block goes through a slot only if a reduce_scatter cannot use it in place.
#include <fmt/format.h>

#include <cstring>

#include "muster/collective/host/host_call.h"

namespace muster {
namespace {

/// The pieces of one step: their maximum length, and where they are.
struct Pieces {
  Pieces(const HostCall& run, size_t largest, size_t header) : header_bytes(header) {
    piece = piece_of(largest, run.comm.slot_bytes(), run.size, run.element, header);
    in_line = header == 0 && piece == largest && piece * run.size <= kStepPayload;
  }
  /// For HostCall::begin(): zero if the slot is not written.
  size_t in_slot() const { return in_line ? 0 : SIZE_MAX; }

  size_t header_bytes;
  size_t piece;
  bool in_line;
};

uint8_t* own_piece(HostCall& run, const Pieces& pieces, Rank to) {
  return (pieces.in_line ? run.comm.payload() : run.comm.slot()) + pieces.header_bytes + to * pieces.piece;
}

const uint8_t* piece_from(HostCall& run, const Pieces& pieces, Rank peer, uint32_t step) {
  const uint8_t* const area = pieces.in_line ? run.comm.payload(peer, step) : run.comm.slot(peer, step);
  return area + pieces.header_bytes + run.rank * pieces.piece;
}

// all_to_all with counts: only the sender and the receiver know how much is sent. So the slots of the first step begin
// with the sender's counts, in elements, and the payload holds the length of its longest block.
void put_counts(HostCall& run, uint64_t largest) {
  std::memcpy(run.comm.slot(), run.operation.counts.data(), run.size * sizeof(uint64_t));
  std::memcpy(run.comm.payload(), &largest, sizeof(largest));
}

/// The longest block of all ranks. kMismatch if the counts of a rank differ from those expected here.
Result<size_t> check_counts(HostCall& run, size_t largest, uint32_t step) {
  for (Rank peer = 0; peer < run.size; ++peer) {
    uint64_t sent, theirs;
    std::memcpy(&sent, run.comm.slot(peer, step) + run.rank * sizeof(uint64_t), sizeof(sent));
    std::memcpy(&theirs, run.comm.payload(peer, step), sizeof(theirs));
    if (const uint64_t expected = run.operation.receive_counts[peer]; sent != expected) {
      return fail(ErrorCode::kMismatch,
                  fmt::format("rank {} sends {} elements to rank {}, which expects {}", peer, sent, run.rank, expected),
                  peer);
    }
    largest = std::max<size_t>(largest, theirs);
  }
  return largest;
}

/// Publishes chunk `index` of the blocks for the other ranks, and of the own block if `own`.
Result<> put_pieces(HostCall& run, const Pieces& pieces, const HostBlocks& blocks, size_t index, bool own) {
  MUSTER_TRY(run.begin(pieces.in_slot()));
  if (pieces.header_bytes > 0 && index == 0) put_counts(run, blocks.largest());
  for (Rank peer = 0; peer < run.size; ++peer) {
    if (peer == run.rank && !own) continue;
    const size_t bytes = chunk_bytes(blocks.bytes(peer), index, pieces.piece);
    run.read_in(blocks.begin(peer) + index * pieces.piece, own_piece(run, pieces, peer), bytes);
  }
  run.comm.publish();
  return {};
}

void combine_pieces(HostCall& run, const Pieces& pieces, const HostBlocks& blocks, size_t index, uint32_t step) {
  const size_t offset = index * pieces.piece;
  const size_t bytes = chunk_bytes(blocks.bytes(run.rank), index, pieces.piece);
  if (bytes == 0) return;
  auto& sources = run.comm.pointers();
  for (Rank peer = 0; peer < run.size; ++peer) sources[peer] = piece_from(run, pieces, peer, step);
  if (run.own_in_place()) sources[run.rank] = run.operation.input.data() + blocks.begin(run.rank) + offset;
  run.combine_out(offset, sources.data(), bytes);
}

void take_pieces(HostCall& run, const Pieces& pieces, const HostBlocks& blocks, size_t index, uint32_t step) {
  for (Rank turn = 1; turn < run.size; ++turn) {
    const Rank peer = (run.rank + turn) % run.size;
    const size_t bytes = chunk_bytes(blocks.bytes(peer), index, pieces.piece);
    run.operation.output.write(blocks.begin(peer) + index * pieces.piece, piece_from(run, pieces, peer, step), bytes);
  }
}

}  // namespace

Result<> host_reduce_scatter(HostCall& run) {
  const HostBlocks blocks(run.call.bytes(), run.operation.counts, run.element);
  const Pieces pieces(run, blocks.largest(), 0);
  const size_t chunks = chunk_count(blocks.largest(), std::max<size_t>(1, pieces.piece));
  const bool own = !run.own_in_place();
  MUSTER_TRY(put_pieces(run, pieces, blocks, 0, own));
  uint32_t step = run.comm.step();
  for (size_t index = 0; index < chunks; ++index, ++step) {
    if (index + 1 < chunks) MUSTER_TRY(put_pieces(run, pieces, blocks, index + 1, own));
    MUSTER_TRY(run.comm.wait_all(step, run.deadline));
    combine_pieces(run, pieces, blocks, index, step);
  }
  return {};
}

Result<> host_all_to_all(HostCall& run) {
  const Operation& operation = run.operation;
  const HostBlocks sent(run.call.bytes(), operation.counts, run.element);
  const HostBlocks received(run.call.bytes(), operation.receive_counts, run.element);
  const bool even = operation.counts.empty();
  size_t largest = sent.largest();
  // With uneven blocks no rank knows the longest one yet, so all ranks use full pieces.
  const Pieces pieces(run, even ? largest : SIZE_MAX, even ? 0 : uneven_header(run.size));
  MUSTER_TRY(put_pieces(run, pieces, sent, 0, false));
  uint32_t step = run.comm.step();
  run.copy_own(sent.begin(run.rank), received.begin(run.rank), sent.bytes(run.rank));
  MUSTER_TRY(run.comm.wait_all(step, run.deadline));
  if (!even) {
    MUSTER_ASSIGN(largest, check_counts(run, largest, step));
  }
  const size_t chunks = chunk_count(largest, std::max<size_t>(1, pieces.piece));
  for (size_t index = 0; index < chunks; ++index, ++step) {
    if (index + 1 < chunks) MUSTER_TRY(put_pieces(run, pieces, sent, index + 1, false));
    if (index > 0) MUSTER_TRY(run.comm.wait_all(step, run.deadline));
    take_pieces(run, pieces, received, index, step);
  }
  return {};
}

}  // namespace muster
