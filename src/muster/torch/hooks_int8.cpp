#include <algorithm>
#include <array>

#include "muster/collective/compress.h"
#include "muster/torch/arguments.h"
#include "muster/torch/hooks_base.h"

namespace muster {
namespace {

/// Elements: 1 MiB to the other one of two ranks, some 8 ms at 1 Gbit/s. Smaller pieces would wait for the way there.
constexpr size_t kPiece = 2 << 20;

/// A piece of a bucket, cut into a shard for each rank, which that rank averages. A quantised shard is a record: its
/// scales, then its elements; all records are of one length.
class Int8Bucket {
 public:
  Int8Bucket(size_t count, size_t block, Rank rank, int size)
      : count_(count),
        block_(block),
        shard_blocks_(((count + block - 1) / block + size - 1) / size),
        rank_(rank),
        size_(size),
        error_(count),
        shard_error_(shard_count(rank)) {}

  size_t record_bytes() const { return shard_blocks_ * (sizeof(float) + block_); }
  size_t message_bytes() const { return record_bytes() * size_; }

  /// `gradients` as a record for each rank.
  void pack(const float* gradients) {
    for (int r = 0; r < size_; ++r) {
      const size_t begin = shard_begin(r);
      quantise(elements(sent, r), scales(sent, r), gradients + begin, 1, error_.data() + begin, shard_count(r), block_);
    }
  }
  /// What came from all ranks as the average's record, in place of the own one of those that were sent.
  void average() {
    constexpr size_t kPiece = 4096;  // elements, so that a sum stays in the first-level cache; rounded up to blocks
    const size_t blocks = (kPiece + block_ - 1) / block_, length = shard_count(rank_);
    std::vector<float> sum(blocks * block_);
    for (size_t done = 0; done < length; done += sum.size()) {
      const size_t piece = std::min(sum.size(), length - done), first = done / block_;
      std::fill_n(sum.begin(), piece, 0.0F);
      for (int r = 0; r < size_; ++r) {
        add_quantised(sum.data(), elements(received, r) + done, scales(received, r) + first, piece, block_);
      }
      quantise(elements(sent, rank_) + done, scales(sent, rank_) + first, sum.data(), 1.0F / static_cast<float>(size_),
               shard_error_.data() + done, piece, block_);
    }
  }
  void unpack(float* gradients) const {
    for (int r = 0; r < size_; ++r) {
      dequantise(gradients + shard_begin(r), elements(sent, r), scales(sent, r), shard_count(r), block_);
    }
  }

  at::Tensor sent, received;  ///< records by rank

 private:
  size_t shard_begin(int r) const { return std::min(count_, r * shard_blocks_ * block_); }
  size_t shard_count(int r) const { return std::min(count_, (r + 1) * shard_blocks_ * block_) - shard_begin(r); }
  float* scales(const at::Tensor& records, int r) const {
    return reinterpret_cast<float*>(records.data_ptr<uint8_t>() + r * record_bytes());
  }
  int8_t* elements(const at::Tensor& records, int r) const {
    return reinterpret_cast<int8_t*>(scales(records, r) + shard_blocks_);
  }

  const size_t count_, block_, shard_blocks_;
  const Rank rank_;
  const int size_;
  std::vector<float> error_, shard_error_;  ///< of what this rank sends, and of the averages that it makes
};

class Int8Hook final : public TwoStepHook {
 public:
  Int8Hook(HookGroups groups, size_t block)
      : TwoStepHook(std::move(groups)),
        block_(block),
        piece_(std::max(block, kPiece - kPiece % std::max<size_t>(block, 1))) {
    check_argument(block > 0 && block % 64 == 0, "int8 hook", "the block must be a multiple of 64 elements, not ",
                   block);
  }

 private:
  using Pieces = std::vector<std::shared_ptr<Int8Bucket>>;

  /// Piece by piece, so that the first one is on its way while the next is quantised. They end in order, and a failure
  /// is every later one's too: the last one's future is the bucket's.
  HookFuture reduce(c10d::GradBucket& bucket) override {
    const at::Tensor& buffer = bucket.getBuffer();
    const auto pieces = states_.of(bucket, [&] { return make(static_cast<size_t>(buffer.numel())); });
    HookFuture last;
    for (size_t i = 0; i < pieces->size(); ++i) last = reduce_piece((*pieces)[i], buffer, i * piece_);
    return last;
  }
  HookFuture reduce_piece(const std::shared_ptr<Int8Bucket>& state, const at::Tensor& buffer, size_t begin) {
    state->pack(buffer.const_data_ptr<float>() + begin);
    const size_t bytes = state->message_bytes();
    uint8_t* const sent = state->sent.data_ptr<uint8_t>();
    const BufferView all(sent, bytes, Dtype::kUint8);
    const BufferView own(sent + rank() * state->record_bytes(), state->record_bytes(), Dtype::kUint8);
    const Work first = group().all_to_all(all, {state->received.data_ptr(), bytes, Dtype::kUint8}, {.async = true});
    return then(
        first, buffer, [state] { state->average(); }, [own, all](Group& group) { return group.all_gather(own, all); },
        [state, buffer, begin] { state->unpack(buffer.data_ptr<float>() + begin); });
  }
  std::shared_ptr<Pieces> make(size_t count) const {
    auto pieces = std::make_shared<Pieces>();
    for (size_t begin = 0; begin < count; begin += piece_) {
      auto state = std::make_shared<Int8Bucket>(std::min(piece_, count - begin), block_, rank(), size());
      state->sent = message(state->message_bytes(), at::kByte);
      state->received = message(state->message_bytes(), at::kByte);
      pieces->push_back(std::move(state));
    }
    return pieces;
  }

  const size_t block_, piece_;  ///< in elements
  BucketStates<Pieces> states_;
};

}  // namespace

Hook int8_hook(HookGroups groups, const Int8Options& options) {
  return std::make_unique<Int8Hook>(std::move(groups), options.block);
}

}  // namespace muster
