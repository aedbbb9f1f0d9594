#include "muster/group/engine/hierarchy.h"

#include <algorithm>

#include "muster/group/operations.h"

namespace muster {
namespace {

BufferView none(Dtype dtype) { return {nullptr, 0, dtype}; }

/// The part of `view` that starts at element `first` and has `count` elements.
BufferView slice(const BufferView& view, size_t first, size_t count) {
  const size_t element = size_of(view.dtype());
  if (count == 0) return none(view.dtype());
  if (view.contiguous()) return {view.data() + first * element, count, view.dtype()};
  std::vector<Segment> segments;
  view.visit(first * element, count * element, [&](uint8_t* data, size_t here) { segments.push_back({data, here}); });
  return BufferView(std::move(segments), view.dtype());
}

}  // namespace

Hierarchy::Hierarchy(const Topology& topology, Rank rank, Levels levels)
    : topology_(topology),
      host_(topology.host_of[rank]),
      local_(topology.host_local_rank[rank]),
      locals_(topology.host_local_size(host_)),
      hosts_(static_cast<int>(topology.hosts.size())),
      first_shard_(topology.first_shard(host_, local_)),
      last_shard_(topology.first_shard(host_, local_ + 1)),
      levels_(std::move(levels)) {}

bool Hierarchy::has(Collective collective) {
  return collective != Collective::kGather && collective != Collective::kScatter && collective != Collective::kAllToAll;
}

Result<> Hierarchy::run(const Operation& operation, const Deadline& deadline) {
  waiting_.clear();
  switch (operation.call.collective) {
    case Collective::kAllReduce:
      return all_reduce(operation, deadline);
    case Collective::kBroadcast:
      return broadcast(operation, deadline);
    case Collective::kReduce:
      return reduce(operation, deadline);
    case Collective::kAllGather:
      return all_gather(operation, deadline);
    case Collective::kReduceScatter:
      return reduce_scatter(operation, deadline);
    default:
      return barrier(operation, deadline);
  }
}

// ---- the collectives

Result<> Hierarchy::all_reduce(const Operation& operation, const Deadline& deadline) {
  const std::vector<Chunk> all = chunks(operation);
  for (size_t i = 0; i < all.size(); ++i) {
    const BufferView own = own_shards(operation.output, all[i]);
    const BufferView tensor = slice(operation.output, all[i].offset, all[i].count);
    MUSTER_TRY(on_host(part(operation, Collective::kReduceScatter, tensor, own, local_counts(all[i])), deadline));
    if (i > 0) MUSTER_TRY(end_across(deadline));
    queue_shards(operation, Collective::kAllReduce, own, all[i]);
    MUSTER_TRY(begin_across(deadline));
    if (i > 0) MUSTER_TRY(all_gather_chunk(operation, all[i - 1], deadline));
  }
  MUSTER_TRY(end_across(deadline));
  return all_gather_chunk(operation, all.back(), deadline);
}

Result<> Hierarchy::broadcast(const Operation& operation, const Deadline& deadline) {
  const Rank root = operation.call.root;
  const bool at_root = host_ == topology_.host_of[root];
  for (const Chunk& chunk : chunks(operation)) {
    const BufferView tensor = slice(operation.output, chunk.offset, chunk.count);
    if (at_root) {
      Operation here = part(operation, Collective::kBroadcast, tensor, tensor);
      here.call.root = topology_.host_local_rank[root];
      MUSTER_TRY(on_host(std::move(here), deadline));
    }
    MUSTER_TRY(end_across(deadline));
    queue_shards(operation, Collective::kBroadcast, own_shards(operation.output, chunk), chunk);
    MUSTER_TRY(begin_across(deadline));
    if (at_root) continue;
    MUSTER_TRY(end_across(deadline));
    MUSTER_TRY(all_gather_chunk(operation, chunk, deadline));
  }
  return end_across(deadline);
}

/// A reduce must not change its inputs, so a host sums into scratch memory. A rank that is alone on its host needs no
/// scratch memory, because it has nothing to sum within the host.
Result<> Hierarchy::reduce(const Operation& operation, const Deadline& deadline) {
  const Rank root = operation.call.root;
  for (const Chunk& chunk : chunks(operation)) {
    const BufferView input = slice(operation.input, chunk.offset, chunk.count);
    BufferView own = input;
    if (locals_ > 1) {
      own = scratch(bound(chunk, last_shard_) - bound(chunk, first_shard_), operation.call.dtype);
      MUSTER_TRY(on_host(part(operation, Collective::kReduceScatter, input, own, local_counts(chunk)), deadline));
    }
    queue_shards(operation, Collective::kReduce, own, chunk);
    MUSTER_TRY(begin_across(deadline));
    MUSTER_TRY(end_across(deadline));
    if (locals_ == 1 || host_ != topology_.host_of[root]) continue;
    // Gathers the shards of all ranks at the root. This is an all_to_all, because gather only supports blocks of equal
    // length.
    const bool at_root = topology_.host_local_rank[root] == local_;
    Operation here = part(operation, Collective::kAllToAll, own,
                          at_root ? slice(operation.output, chunk.offset, chunk.count) : none(operation.call.dtype));
    here.counts.assign(locals_, 0);
    here.counts[topology_.host_local_rank[root]] = own.count();
    here.receive_counts = at_root ? local_counts(chunk) : std::vector<size_t>(locals_, 0);
    MUSTER_TRY(on_host(std::move(here), deadline));
  }
  return {};
}

/// Sends each block to one rank of every other host. That rank passes it on to all ranks of its host.
Result<> Hierarchy::all_gather(const Operation& operation, const Deadline& deadline) {
  for (int shard = first_shard_; shard < last_shard_; ++shard) {
    const BufferView own = shard == first_shard_ ? operation.input : none(operation.call.dtype);
    const BufferView all = blocks(operation, operation.output, shard, shard + 1);
    waiting_.emplace_back(part(operation, Collective::kAllGather, own, all, block_counts(operation, shard)), shard);
  }
  MUSTER_TRY(begin_across(deadline));
  MUSTER_TRY(end_across(deadline));
  const BufferView own = blocks(operation, operation.output, first_shard_, last_shard_);
  const BufferView all = blocks(operation, operation.output, 0, topology_.shards);
  return on_host(part(operation, Collective::kAllGather, own, all, shard_counts(operation)), deadline);
}

/// The reverse of all_gather: the ranks of each host reduce their shards, then each rank exchanges its shards with the
/// other hosts, and the owner of a block gets the sum.
Result<> Hierarchy::reduce_scatter(const Operation& operation, const Deadline& deadline) {
  BufferView sums = blocks(operation, operation.input, first_shard_, last_shard_);
  if (locals_ > 1) {
    sums = scratch(sums.count(), operation.call.dtype);
    const BufferView all = blocks(operation, operation.input, 0, topology_.shards);
    MUSTER_TRY(on_host(part(operation, Collective::kReduceScatter, all, sums, shard_counts(operation)), deadline));
  }
  size_t offset = 0;
  for (int shard = first_shard_; shard < last_shard_; ++shard) {
    std::vector<size_t> counts = block_counts(operation, shard);
    const size_t count = total(counts);
    const BufferView own = shard == first_shard_ ? operation.output : none(operation.call.dtype);
    waiting_.emplace_back(
        part(operation, Collective::kReduceScatter, slice(sums, offset, count), own, std::move(counts)), shard);
    offset += count;
  }
  MUSTER_TRY(begin_across(deadline));
  return end_across(deadline);
}

Result<> Hierarchy::barrier(const Operation& operation, const Deadline& deadline) {
  MUSTER_TRY(on_host(operation, deadline));
  if (first_shard_ == 0 && last_shard_ > 0) {
    waiting_.emplace_back(operation, 0);
    MUSTER_TRY(begin_across(deadline));
    MUSTER_TRY(end_across(deadline));
  }
  return on_host(operation, deadline);
}

// ---- shards

/// At least one chunk, also for an empty tensor.
std::vector<Hierarchy::Chunk> Hierarchy::chunks(const Operation& operation) const {
  const size_t count = operation.call.count;
  const size_t most = std::max<size_t>(1, kChunkBytes / size_of(operation.call.dtype));
  std::vector<Chunk> all;
  size_t offset = 0;
  do {
    all.push_back({offset, std::min(most, count - offset)});
    offset += all.back().count;
  } while (offset < count);
  return all;
}

std::vector<size_t> Hierarchy::local_counts(const Chunk& chunk) const {
  std::vector<size_t> counts;
  for (int local = 0; local < locals_; ++local) {
    counts.push_back(bound(chunk, topology_.first_shard(host_, local + 1)) -
                     bound(chunk, topology_.first_shard(host_, local)));
  }
  return counts;
}

BufferView Hierarchy::own_shards(const BufferView& tensor, const Chunk& chunk) const {
  const size_t begin = bound(chunk, first_shard_);
  return slice(tensor, begin, bound(chunk, last_shard_) - begin);
}

/// Elements of each host in a shard of an all_gather or reduce_scatter: the length of the block of the shard's owner on
/// that host, or 0 if that host has no owner.
std::vector<size_t> Hierarchy::block_counts(const Operation& operation, int shard) const {
  std::vector<size_t> counts;
  for (int host = 0; host < hosts_; ++host) {
    const Rank owner = topology_.owner(host, shard);
    counts.push_back(owner == kNoRank ? 0 : operation.counts.empty() ? operation.call.count : operation.counts[owner]);
  }
  return counts;
}

/// For each rank of this host, the number of elements in all its shards, over all hosts.
std::vector<size_t> Hierarchy::shard_counts(const Operation& operation) const {
  std::vector<size_t> counts(locals_, 0);
  for (int local = 0; local < locals_; ++local) {
    const int last = topology_.first_shard(host_, local + 1);
    for (int shard = topology_.first_shard(host_, local); shard < last; ++shard) {
      counts[local] += total(block_counts(operation, shard));
    }
  }
  return counts;
}

/// The blocks of the shards from `first_shard` to `last_shard` (exclusive), ordered by shard, then by host.
BufferView Hierarchy::blocks(const Operation& operation, const BufferView& whole, int first_shard,
                             int last_shard) const {
  const size_t element = size_of(operation.call.dtype);
  std::vector<size_t> offsets(topology_.host_of.size() + 1, 0);
  for (size_t rank = 0; rank + 1 < offsets.size(); ++rank) {
    const size_t count = operation.counts.empty() ? operation.call.count : operation.counts[rank];
    offsets[rank + 1] = offsets[rank] + count * element;
  }
  std::vector<Segment> segments;
  for (int shard = first_shard; shard < last_shard; ++shard) {
    for (int host = 0; host < hosts_; ++host) {
      const Rank owner = topology_.owner(host, shard);
      if (owner == kNoRank) continue;
      whole.visit(offsets[owner], offsets[owner + 1] - offsets[owner], [&](uint8_t* data, size_t bytes) {
        segments.push_back({data, bytes});
      });
    }
  }
  return BufferView(std::move(segments), operation.call.dtype);
}

// ---- the two levels

Operation Hierarchy::part(const Operation& whole, Collective collective, BufferView input, BufferView output,
                          std::vector<size_t> counts) const {
  Call call = whole.call;
  call.collective = collective;
  call.root = 0;
  if (call.op == ReduceOp::kAverage || call.op == ReduceOp::kPremulSum) call.op = ReduceOp::kSum;
  return {.call = call,
          .input = std::move(input),
          .output = std::move(output),
          .counts = std::move(counts),
          .parent = &whole.reported_call()};
}

Result<> Hierarchy::on_host(Operation operation, const Deadline& deadline) {
  if (locals_ == 1) return {};
  MUSTER_TRY(validate_and_infer(operation, GroupSpec{local_, locals_, {}, 0}));
  return levels_.on_host(operation, deadline);
}

/// Each rank of this host sends its shards of the chunk to the other ranks of the host.
Result<> Hierarchy::all_gather_chunk(const Operation& whole, const Chunk& chunk, const Deadline& deadline) {
  const BufferView tensor = slice(whole.output, chunk.offset, chunk.count);
  const BufferView own = own_shards(whole.output, chunk);
  return on_host(part(whole, Collective::kAllGather, own, tensor, local_counts(chunk)), deadline);
}

/// Queues this rank's shards of the chunk, `own`, for the exchange between hosts.
void Hierarchy::queue_shards(const Operation& whole, Collective collective, const BufferView& own, const Chunk& chunk) {
  const size_t begin = bound(chunk, first_shard_);
  for (int shard = first_shard_; shard < last_shard_; ++shard) {
    const size_t from = bound(chunk, shard), to = bound(chunk, shard + 1);
    if (from == to) continue;
    const BufferView tensor = slice(own, from - begin, to - from);
    Operation sub = part(whole, collective, tensor, tensor);
    sub.call.root = has_root(collective) ? topology_.host_of[whole.call.root] : 0;
    waiting_.emplace_back(std::move(sub), shard);
  }
}

Result<> Hierarchy::begin_across(const Deadline& deadline) {
  if (waiting_.empty()) return {};
  auto& [operation, shard] = waiting_.front();
  MUSTER_TRY(validate_and_infer(operation, GroupSpec{host_, hosts_, {}, 0}));
  return levels_.begin_across(operation, shard, deadline);
}

/// All ranks exchange their shards in the same order, so that no rank waits for a shard that its peers exchange later.
Result<> Hierarchy::end_across(const Deadline& deadline) {
  while (!waiting_.empty()) {
    MUSTER_TRY(levels_.end_across(deadline));
    waiting_.pop_front();
    MUSTER_TRY(begin_across(deadline));
  }
  return {};
}

BufferView Hierarchy::scratch(size_t count, Dtype dtype) {
  const size_t bytes = count * size_of(dtype);
  if (scratch_.size() < bytes) scratch_.resize(bytes);
  return {scratch_.data(), count, dtype};
}

}  // namespace muster
