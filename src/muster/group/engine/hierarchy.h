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
/// rank with its own shards, so that no single rank is a bottleneck. As few bytes as possible cross hosts. With H hosts
/// and a tensor of S bytes, the total is 2 (H - 1) S for all_reduce, (H - 1) S for broadcast, and up to 2 (H - 1) S for
/// reduce. all_gather sends each block once to each other host. reduce_scatter sends one sum per block and host.
///
/// all_reduce is a reduce_scatter in the host communicator, an all_reduce of each shard between hosts, and an
/// all_gather in the host communicator; the other collectives work alike. Large tensors are cut into chunks: one is
/// exchanged between hosts while the next is reduced.
///
/// It has one private function for each collective, and helpers for the shards, chunks and queue that they share.
class Hierarchy {
 public:
  struct Levels {
    /// Runs an operation between this host's ranks, which are numbered from 0 on each host.
    std::function<Result<>(const Operation& operation, const Deadline& deadline)> on_host;
    /// Starts an operation between the ranks that handle `shard`, one on each host. begin_across() may return before
    /// the operation is done. end_across() waits until it is done. Only one such operation runs at a time.
    std::function<Result<>(const Operation& operation, int shard, const Deadline& deadline)> begin_across;
    std::function<Result<>(const Deadline& deadline)> end_across;
  };
  Hierarchy(const Topology& topology, Rank rank, Levels levels);

  /// Bytes of a chunk. Long enough to keep the network busy, and short enough that the exchange of one chunk overlaps
  /// with the reduction of the next.
  static constexpr size_t kChunkBytes = 8 << 20;
  /// False for gather, scatter and all_to_all: two levels would not save bytes, because each of their bytes crosses
  /// hosts only once anyway.
  static bool has(Collective collective);
  /// Computes sums for kAverage and kPremulSum. The caller applies the division or the factor.
  Result<> run(const Operation& operation, const Deadline& deadline);

 private:
  /// A range of the tensor, in elements. Shard s of a chunk begins at bound(chunk, s).
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

  Operation part(const Operation& whole, Collective collective, BufferView input, BufferView output,
                 std::vector<size_t> counts = {}) const;
  Result<> on_host(Operation operation, const Deadline& deadline);
  Result<> all_gather_chunk(const Operation& whole, const Chunk& chunk, const Deadline& deadline);
  void queue_shards(const Operation& whole, Collective collective, const BufferView& own, const Chunk& chunk);
  Result<> begin_across(const Deadline& deadline);
  Result<> end_across(const Deadline& deadline);
  BufferView scratch(size_t count, Dtype dtype);

  const Topology& topology_;
  const int host_, local_, locals_, hosts_;
  const int first_shard_, last_shard_;  ///< this rank's shards; last_shard_ is one past the end
  const Levels levels_;
  /// Operations and their shards to exchange between hosts; the first one is running.
  std::deque<std::pair<Operation, int>> waiting_;
  Bytes scratch_;
};

}  // namespace muster
