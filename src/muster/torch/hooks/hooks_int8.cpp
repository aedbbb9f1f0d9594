#include <algorithm>

#include "muster/kernels/compress.h"
#include "muster/torch/c10d/arguments.h"
#include "muster/torch/hooks/hooks_base.h"

namespace muster {
namespace {

/// Elements that go to one rank at a time: 1 MiB, some 8 ms at 1 Gbit/s. Smaller pieces would wait for the way there.
constexpr size_t kPiece = 1 << 20;

/// Quantised lists of `count` elements, one for each rank, in one message. A list is its scales, then its elements.
struct QuantizedChunks {
  size_t bytes() const { return blocks * (sizeof(float) + block); }
  float* scales(Rank r) const { return reinterpret_cast<float*>(memory.data_ptr<uint8_t>() + r * bytes()); }
  int8_t* elements(Rank r) const { return reinterpret_cast<int8_t*>(scales(r) + blocks); }
  BufferView one(Rank r) const { return {scales(r), bytes(), Dtype::kUint8}; }
  BufferView all() const { return {memory.data_ptr(), static_cast<size_t>(memory.numel()), Dtype::kUint8}; }

  size_t blocks = 0, block = 0;
  at::Tensor memory;
};

/// A piece of a bucket between two ranks: each sends all of its own, which is as much as two steps would send.
class PairwiseChunk {
 public:
  PairwiseChunk(QuantizedChunks records, size_t count) : records(std::move(records)), error_(count) {}

  void pack(const float* gradients, Rank self) {
    quantise(records.elements(self), records.scales(self), gradients, 1, error_.data(), error_.size(), records.block);
  }
  void average_into(float* gradients) {
    for (const Rank r : {0, 1}) {
      for (size_t i = 0; i < records.blocks; ++i) records.scales(r)[i] *= 0.5F;
    }
    dequantise(gradients, records.elements(0), records.scales(0), error_.size(), records.block);
    add_quantised(gradients, records.elements(1), records.scales(1), error_.size(), records.block);
  }

  const QuantizedChunks records;

 private:
  std::vector<float> error_;  ///< of what this rank sends
};

/// A piece of a bucket between more ranks: each averages a shard of it for all.
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

  /// `gradients` as a record for each rank.
  void pack(const float* gradients) {
    for (Rank r = 0; r < size_; ++r) {
      const size_t begin = shard_begin(r);
      quantise(sent.elements(r), sent.scales(r), gradients + begin, 1, error_.data() + begin, shard_count(r),
               sent.block);
    }
  }
  /// What came from all ranks as the average's record, in place of the own one of those that were sent.
  void average() {
    constexpr size_t kAtOnce = 4096;  // elements, so that a sum stays in the first-level cache; rounded up to blocks
    const size_t block = sent.block, length = shard_count(rank_);
    std::vector<float> sum((kAtOnce + block - 1) / block * block);
    for (size_t done = 0; done < length; done += sum.size()) {
      const size_t now = std::min(sum.size(), length - done), first = done / block;
      std::fill_n(sum.begin(), now, 0.0F);
      for (Rank r = 0; r < size_; ++r) {
        add_quantised(sum.data(), received.elements(r) + done, received.scales(r) + first, now, block);
      }
      quantise(sent.elements(rank_) + done, sent.scales(rank_) + first, sum.data(), 1.0F / static_cast<float>(size_),
               shard_error_.data() + done, now, block);
    }
  }
  void unpack(float* gradients) const {
    for (Rank r = 0; r < size_; ++r) {
      dequantise(gradients + shard_begin(r), sent.elements(r), sent.scales(r), shard_count(r), sent.block);
    }
  }

  const QuantizedChunks sent, received;

 private:
  size_t shard_begin(Rank r) const { return std::min(count_, r * sent.blocks * sent.block); }
  size_t shard_count(Rank r) const { return shard_begin(r + 1) - shard_begin(r); }

  const size_t count_;
  const Rank rank_;
  const int size_;
  std::vector<float> error_, shard_error_;  ///< of what this rank sends, and of the averages that it makes
};

/// Reduces piece by piece, so that the first one is on its way while the next is quantised.
class Int8Hook final : public TwoPhaseHook {
 public:
  Int8Hook(HookGroups groups, size_t block) : TwoPhaseHook(std::move(groups)), block_(block) {}

 private:
  template <class Piece>
  using Pieces = std::vector<std::shared_ptr<Piece>>;

  HookFuture reduce(c10d::GradBucket& bucket) override { return size() == 2 ? exchange(bucket) : shard(bucket); }

  /// The pieces go over either group in turn: while one ends, the next is on its way.
  HookFuture exchange(c10d::GradBucket& bucket) {
    const at::Tensor& buffer = bucket.getBuffer();
    const size_t step = piece(1);
    const auto pieces = exchanged_.of(bucket, [&] {
      return cut<PairwiseChunk>(buffer, step, [&](size_t count) {
        return std::make_shared<PairwiseChunk>(records((count + block_ - 1) / block_), count);
      });
    });
    const HookFuture future = new_future();
    const auto outcome = std::make_shared<Result<>>();
    for (size_t i = 0; i < pieces->size(); ++i) {
      const std::shared_ptr<PairwiseChunk>& piece = (*pieces)[i];
      piece->pack(buffer.const_data_ptr<float>() + i * step, rank());
      Group& way = turn_++ % 2 == 0 ? group() : *second();
      const Work work = way.all_gather(piece->records.one(rank()), piece->records.all(), {.async = true});
      const bool last = i + 1 == pieces->size();
      after(work, future, [=, begin = i * step](const Result<>& result) {
        if (*outcome) *outcome = result;
        if (*outcome) piece->average_into(buffer.data_ptr<float>() + begin);
        if (last) complete(future, *outcome, buffer);
      });
    }
    return future;
  }

  /// The pieces end in order, and a failure is every later one's too: the last one's future is the bucket's.
  HookFuture shard(c10d::GradBucket& bucket) {
    const at::Tensor& buffer = bucket.getBuffer();
    const size_t step = piece(size());
    const auto pieces = sharded_.of(bucket, [&] {
      return cut<ShardedChunk>(buffer, step, [&](size_t count) {
        const size_t blocks = (count + block_ - 1) / block_, shard = (blocks + size() - 1) / size();
        return std::make_shared<ShardedChunk>(records(shard), records(shard), count, rank(), size());
      });
    });
    HookFuture last;
    for (size_t i = 0; i < pieces->size(); ++i) {
      const std::shared_ptr<ShardedChunk>& piece = (*pieces)[i];
      piece->pack(buffer.const_data_ptr<float>() + i * step);
      const Work first = group().all_to_all(piece->sent.all(), piece->received.all(), {.async = true});
      last = then(
          first, buffer, [piece] { piece->average(); },
          [piece, rank = rank()](Group& group) { return group.all_gather(piece->sent.one(rank), piece->sent.all()); },
          [piece, buffer, begin = i * step] { piece->unpack(buffer.data_ptr<float>() + begin); });
    }
    return last;
  }

  /// Elements of a piece of which each of `ranks` others gets a part: whole blocks.
  size_t piece(int ranks) const { return std::max<size_t>(1, kPiece / block_) * block_ * ranks; }
  QuantizedChunks records(size_t blocks) const {
    QuantizedChunks made{blocks, block_, {}};
    made.memory = message(made.bytes() * size(), at::kByte);
    return made;
  }
  template <class Piece, class Make>
  static std::shared_ptr<Pieces<Piece>> cut(const at::Tensor& buffer, size_t step, Make make) {
    auto pieces = std::make_shared<Pieces<Piece>>();
    const auto count = static_cast<size_t>(buffer.numel());
    for (size_t begin = 0; begin < count; begin += step) pieces->push_back(make(std::min(step, count - begin)));
    return pieces;
  }

  const size_t block_;  ///< in elements
  size_t turn_ = 0;     ///< of the groups
  BucketStates<Pieces<PairwiseChunk>> exchanged_;
  BucketStates<Pieces<ShardedChunk>> sharded_;
};

}  // namespace

void Int8Options::check() const {
  check_argument(block > 0 && block % 64 == 0, "int8 hook", "the block must be a multiple of 64 elements, not ", block);
}

Hook int8_hook(HookGroups groups, const Int8Options& options) {
  options.check();
  return std::make_unique<Int8Hook>(std::move(groups), options.block);
}

}  // namespace muster
