#pragma once

#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "muster/base/clock.h"
#include "muster/collective/operation.h"
#include "muster/group/form/topology.h"

namespace muster {

/// Collectives over several hosts in two levels: within a host through its host communicator, between hosts with every
/// rank sending its own shard, so that no leader is a bottleneck. As few bytes as possible cross hosts: with H hosts
/// and a tensor of S bytes 2 (H - 1) S in all for all_reduce, (H - 1) S for broadcast (and up to twice that for
/// reduce); for all_gather each block once into each foreign host, for reduce_scatter the host's sum of each foreign
/// block once out.
///
/// all_reduce: reduce_scatter in the host communicator, all_reduce of each slot across hosts, all_gather in the host
/// communicator; the other collectives likewise. Large tensors go in chunks: one is on its way while the next is
/// reduced.
class Hierarchy {
 public:
  struct Levels {
    /// An operation of this host's ranks, counted by place.
    std::function<Result<>(const Operation& operation, const Deadline& deadline)> on_host;
    /// One of as many ranks as there are hosts, by those who carry `slot`. begin_across() may return before it is over,
    /// end_across() returns when it is; one at a time.
    std::function<Result<>(const Operation& operation, int shard, const Deadline& deadline)> begin_across;
    std::function<Result<>(const Deadline& deadline)> end_across;
  };
  Hierarchy(const Topology& topology, Rank rank, Levels levels);

  /// Of a tensor that is under way at once: long enough to keep the network busy, short enough to overlap.
  static constexpr size_t kChunkBytes = 8 << 20;
  /// Whether it has a form for the collective; gather, scatter and all_to_all need none: each byte crosses once anyhow.
  static bool has(Collective collective);
  /// Reductions only sum: averages and factors are the caller's.
  Result<> run(const Operation& operation, const Deadline& deadline);

 private:
  /// A stretch of the tensor, in elements. Slot s of it begins at bound(s).
  struct Chunk {
    size_t offset, count;
  };
  std::vector<Chunk> chunks(const Operation& operation) const;
  size_t bound(const Chunk& chunk, int shard) const { return chunk.offset + chunk.count * shard / topology_.shards; }
  std::vector<size_t> local_counts(const Chunk& chunk) const;
  std::vector<size_t> block_counts(const Operation& operation, int shard) const;
  std::vector<size_t> carried_counts(const Operation& operation) const;
  BufferView own_part(const BufferView& tensor, const Chunk& chunk) const;
  BufferView blocks(const Operation& operation, const BufferView& whole, int first_shard, int last_slot) const;

  Result<> all_reduce(const Operation& operation, const Deadline& deadline);
  Result<> broadcast(const Operation& operation, const Deadline& deadline);
  Result<> reduce(const Operation& operation, const Deadline& deadline);
  Result<> all_gather(const Operation& operation, const Deadline& deadline);
  Result<> reduce_scatter(const Operation& operation, const Deadline& deadline);
  Result<> barrier(const Operation& operation, const Deadline& deadline);

  Operation part(const Operation& whole, Collective collective, BufferView input, BufferView output) const;
  Result<> on_host(Operation operation, const Deadline& deadline);
  Result<> gather_chunk(const Operation& whole, const Chunk& chunk, const Deadline& deadline);
  void queue_slots(const Operation& whole, Collective collective, const BufferView& own, const Chunk& chunk);
  void queue(Operation operation, int shard);
  Result<> begin_across(const Deadline& deadline);
  Result<> end_across(const Deadline& deadline);
  BufferView scratch(size_t count, Dtype dtype);

  const Topology& topology_;
  const int host_, local_, locals_, hosts_;
  const int first_slot_, last_slot_;  ///< what this rank carries; last: one past
  const Levels levels_;
  std::deque<std::pair<Operation, int>> waiting_;  ///< to cross hosts, the first of them under way
  Bytes scratch_;
};

}  // namespace muster
