#include <algorithm>

#include "muster/kernels/compress.h"
#include "muster/torch/c10d/arguments.h"
#include "muster/torch/hooks/hooks_base.h"

namespace muster {
namespace {

/// Elements of a chunk for one rank: 1 MiB, about 8 ms at 1 Gbit/s. In smaller chunks latency would dominate.
constexpr size_t kChunk = 1 << 20;

/// One message with a quantized list for each rank. A list has its scales, then its elements.
struct QuantizedChunks {
  size_t bytes() const { return blocks * (sizeof(float) + block); }
  float* scales(Rank r) const { return reinterpret_cast<float*>(memory.data_ptr<uint8_t>() + r * bytes()); }
  int8_t* elements(Rank r) const { return reinterpret_cast<int8_t*>(scales(r) + blocks); }
  BufferView one(Rank r) const { return {scales(r), bytes(), Dtype::kUint8}; }
  BufferView all() const { return {memory.data_ptr(), static_cast<size_t>(memory.numel()), Dtype::kUint8}; }

  size_t blocks = 0, block = 0;
  at::Tensor memory;
};

/// A chunk of a bucket if there are two ranks. Each rank sends its whole chunk to the other one: as many bytes as two
/// phases would send.
class PairwiseChunk {
 public:
  PairwiseChunk(QuantizedChunks lists, size_t count) : lists(std::move(lists)), error_(count) {}

  void pack(const float* gradients, Rank self) {
    quantize(lists.elements(self), lists.scales(self), gradients, 1, error_.data(), error_.size(), lists.block);
  }
  void average_into(float* gradients) {
    for (const Rank r : {0, 1}) {
      for (size_t i = 0; i < lists.blocks; ++i) lists.scales(r)[i] *= 0.5F;
    }
    dequantize(gradients, lists.elements(0), lists.scales(0), error_.size(), lists.block);
    add_quantized(gradients, lists.elements(1), lists.scales(1), error_.size(), lists.block);
  }

  const QuantizedChunks lists;

 private:
  std::vector<float> error_;  ///< rounding errors of the last step, added to the next step's gradients
};

/// A chunk of a bucket if there are more than two ranks. Each rank averages one shard of it for all ranks.
class ShardedChunk {
 public:
  ShardedChunk(QuantizedChunks sent, QuantizedChunks received, size_t count, Rank rank, int size)
      : sent(std::move(sent)),
        received(std::move(received)),
        count_(count),
        rank_(rank),
        size_(size),
        error_(count),
        shard_error_(shard_count(rank)) {}

  /// Quantizes the shard of each rank.
  void pack(const float* gradients) {
    for (Rank r = 0; r < size_; ++r) {
      const size_t begin = shard_begin(r);
      quantize(sent.elements(r), sent.scales(r), gradients + begin, 1, error_.data() + begin, shard_count(r),
               sent.block);
    }
  }
  /// Averages this rank's shard over all ranks. Quantizes the average into the place of the shard that it sent.
  void average() {
    constexpr size_t kAtOnce = 4096;  // elements that fit into the L1 cache; rounded up to blocks
    const size_t block = sent.block, length = shard_count(rank_);
    std::vector<float> sum((kAtOnce + block - 1) / block * block);
    for (size_t done = 0; done < length; done += sum.size()) {
      const size_t now = std::min(sum.size(), length - done), first = done / block;
      std::fill_n(sum.begin(), now, 0.0F);
      for (Rank r = 0; r < size_; ++r) {
        add_quantized(sum.data(), received.elements(r) + done, received.scales(r) + first, now, block);
      }
      quantize(sent.elements(rank_) + done, sent.scales(rank_) + first, sum.data(), 1.0F / static_cast<float>(size_),
               shard_error_.data() + done, now, block);
    }
  }
  void unpack(float* gradients) const {
    for (Rank r = 0; r < size_; ++r) {
      dequantize(gradients + shard_begin(r), sent.elements(r), sent.scales(r), shard_count(r), sent.block);
    }
  }

  const QuantizedChunks sent, received;

 private:
  size_t shard_begin(Rank r) const { return std::min(count_, r * sent.blocks * sent.block); }
  size_t shard_count(Rank r) const { return shard_begin(r + 1) - shard_begin(r); }

  const size_t count_;
  const Rank rank_;
  const int size_;
  /// Rounding errors of the last step, of this rank's gradients and of its averaged shard. Added in the next step.
  std::vector<float> error_, shard_error_;
};

/// Reduces chunk by chunk: one chunk is sent while the next one is quantized.
class Int8Hook final : public TwoPhaseHook {
 public:
  Int8Hook(HookGroups groups, size_t block) : TwoPhaseHook(std::move(groups)), block_(block) {}

 private:
  template <class Chunk>
  using Chunks = std::vector<std::shared_ptr<Chunk>>;

  HookFuture reduce(c10d::GradBucket& bucket) override {
    return size() == 2 ? reduce_pairwise(bucket) : reduce_sharded(bucket);
  }

  /// Chunks alternate between the two groups, so that one chunk is sent while the one before it ends.
  HookFuture reduce_pairwise(c10d::GradBucket& bucket) {
    const at::Tensor& buffer = bucket.getBuffer();
    const size_t step = chunk_size(1);
    const auto chunks = pairwise_chunks_.of(bucket, [&] {
      return split<PairwiseChunk>(buffer, step, [&](size_t count) {
        return std::make_shared<PairwiseChunk>(make_lists((count + block_ - 1) / block_), count);
      });
    });
    const HookFuture future = new_future();
    const auto result = std::make_shared<Result<>>();
    for (size_t i = 0; i < chunks->size(); ++i) {
      const std::shared_ptr<PairwiseChunk>& chunk = (*chunks)[i];
      chunk->pack(buffer.const_data_ptr<float>() + i * step, rank());
      Group& next = turn_++ % 2 == 0 ? group() : *secondary();
      const Work work = next.all_gather(chunk->lists.one(rank()), chunk->lists.all(), {.async = true});
      const bool last = i + 1 == chunks->size();
      after(work, future, [=, begin = i * step](const Result<>& of_chunk) {
        if (*result) *result = of_chunk;
        if (*result) chunk->average_into(buffer.data_ptr<float>() + begin);
        if (last) complete(future, *result, buffer);
      });
    }
    return future;
  }

  /// Chunks end in order, and after a failure all later chunks fail. So the future of the last chunk is that of the
  /// bucket.
  HookFuture reduce_sharded(c10d::GradBucket& bucket) {
    const at::Tensor& buffer = bucket.getBuffer();
    const size_t step = chunk_size(size());
    const auto chunks = sharded_chunks_.of(bucket, [&] {
      return split<ShardedChunk>(buffer, step, [&](size_t count) {
        const size_t blocks = (count + block_ - 1) / block_, shard = (blocks + size() - 1) / size();
        return std::make_shared<ShardedChunk>(make_lists(shard), make_lists(shard), count, rank(), size());
      });
    });
    HookFuture last;
    for (size_t i = 0; i < chunks->size(); ++i) {
      const std::shared_ptr<ShardedChunk>& chunk = (*chunks)[i];
      chunk->pack(buffer.const_data_ptr<float>() + i * step);
      const Work first = group().all_to_all(chunk->sent.all(), chunk->received.all(), {.async = true});
      last = then(
          first, buffer, [chunk] { chunk->average(); },
          [chunk, rank = rank()](Group& group) { return group.all_gather(chunk->sent.one(rank), chunk->sent.all()); },
          [chunk, buffer, begin = i * step] { chunk->unpack(buffer.data_ptr<float>() + begin); });
    }
    return last;
  }

  /// Elements of a chunk that is split between `ranks` ranks: whole blocks for each.
  size_t chunk_size(int ranks) const { return std::max<size_t>(1, kChunk / block_) * block_ * ranks; }
  QuantizedChunks make_lists(size_t blocks) const {
    QuantizedChunks made{blocks, block_, {}};
    made.memory = message(made.bytes() * size(), at::kByte);
    return made;
  }
  template <class Chunk, class Make>
  static std::shared_ptr<Chunks<Chunk>> split(const at::Tensor& buffer, size_t step, Make make) {
    auto chunks = std::make_shared<Chunks<Chunk>>();
    const auto count = static_cast<size_t>(buffer.numel());
    for (size_t begin = 0; begin < count; begin += step) chunks->push_back(make(std::min(step, count - begin)));
    return chunks;
  }

  const size_t block_;  ///< in elements
  size_t turn_ = 0;     ///< number of chunks so far; even ones use group(), odd ones the secondary group
  BucketStates<Chunks<PairwiseChunk>> pairwise_chunks_;
  BucketStates<Chunks<ShardedChunk>> sharded_chunks_;
};

}  // namespace

void Int8Options::check() const {
  check_argument(block > 0 && block % 64 == 0, "int8 hook", "the block must be a multiple of 64 elements, got ", block);
}

Hook int8_hook(HookGroups groups, const Int8Options& options) {
  options.check();
  return std::make_unique<Int8Hook>(std::move(groups), options.block);
}

}  // namespace muster
