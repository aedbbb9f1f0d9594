#pragma once

#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "muster/base/clock.h"
#include "muster/collective/operation.h"
#include "muster/group/form/topology.h"

namespace muster {

/// Collectives over several hosts in two levels: within a host through its host communicator, between hosts by every
/// rank with its own shards, so that no single rank is a bottleneck. As few bytes as possible cross hosts: with H hosts
/// and a tensor of S bytes 2 (H - 1) S in all for all_reduce, (H - 1) S for broadcast, up to twice that for reduce.
/// all_gather sends each block once to each other host; reduce_scatter sends one sum per block and host.
///
/// all_reduce is a reduce_scatter in the host communicator, an all_reduce of each shard between hosts, and an
/// all_gather in the host communicator; the other collectives work alike. Large tensors are cut into chunks: one is
/// exchanged between hosts while the next is reduced.
class Hierarchy {
 public:
  struct Levels {
    /// An operation between this host's ranks, numbered from 0 on the host.
    std::function<Result<>(const Operation& operation, const Deadline& deadline)> on_host;
    /// An operation between the ranks that have `shard`, one for each host. begin_across() may return before it is
    /// over, end_across() returns when it is. One at a time.
    std::function<Result<>(const Operation& operation, int shard, const Deadline& deadline)> begin_across;
    std::function<Result<>(const Deadline& deadline)> end_across;
  };
  Hierarchy(const Topology& topology, Rank rank, Levels levels);

  /// Long enough to keep the network busy, short enough to overlap.
  static constexpr size_t kChunkBytes = 8 << 20;
  /// Not gather, scatter and all_to_all: without two levels, too, each of their bytes crosses hosts once.
  static bool has(Collective collective);
  /// Reductions only sum; the caller computes averages and factors.
  Result<> run(const Operation& operation, const Deadline& deadline);

 private:
  /// A range of the tensor, in elements. Its shard s begins at bound(s).
  struct Chunk {
    size_t offset, count;
  };
  std::vector<Chunk> chunks(const Operation& operation) const;
  size_t bound(const Chunk& chunk, int shard) const { return chunk.offset + chunk.count * shard / topology_.shards; }
  std::vector<size_t> local_counts(const Chunk& chunk) const;
  std::vector<size_t> block_counts(const Operation& operation, int shard) const;
  std::vector<size_t> shard_counts(const Operation& operation) const;
  BufferView own_shards(const BufferView& tensor, const Chunk& chunk) const;
  BufferView blocks(const Operation& operation, const BufferView& whole, int first_shard, int last_shard) const;

  Result<> all_reduce(const Operation& operation, const Deadline& deadline);
  Result<> broadcast(const Operation& operation, const Deadline& deadline);
  Result<> reduce(const Operation& operation, const Deadline& deadline);
  Result<> all_gather(const Operation& operation, const Deadline& deadline);
  Result<> reduce_scatter(const Operation& operation, const Deadline& deadline);
  Result<> barrier(const Operation& operation, const Deadline& deadline);

  Operation part(const Operation& whole, Collective collective, BufferView input, BufferView output) const;
  Result<> on_host(Operation operation, const Deadline& deadline);
  Result<> all_gather_chunk(const Operation& whole, const Chunk& chunk, const Deadline& deadline);
  void queue_shards(const Operation& whole, Collective collective, const BufferView& own, const Chunk& chunk);
  void queue(Operation operation, int shard);
  Result<> begin_across(const Deadline& deadline);
  Result<> end_across(const Deadline& deadline);
  BufferView scratch(size_t count, Dtype dtype);

  const Topology& topology_;
  const int host_, local_, locals_, hosts_;
  const int first_shard_, last_shard_;  ///< this rank's shards; last: one past the end
  const Levels levels_;
  std::deque<std::pair<Operation, int>> waiting_;  ///< to be exchanged between hosts; the first is running
  Bytes scratch_;
};

}  // namespace muster
