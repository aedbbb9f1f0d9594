#include <algorithm>
#include <cmath>

#include "muster/kernels/compress.h"
#include "muster/kernels/reduce.h"
#include "muster/torch/c10d/arguments.h"
#include "muster/torch/hooks/hooks_base.h"

namespace muster {
namespace {

/// A message has the positions of a rank's largest elements, then their values.
class TopKBucket {
 public:
  TopKBucket(size_t count, size_t kept) : kept_(kept), error_(count) {}

  /// Four-byte words in a message.
  size_t words() const { return 2 * kept_; }

  void pack(const float* gradients) {
    reduce_into(error_.data(), gradients, error_.size(), Dtype::kFloat32, ReduceOp::kSum);
    uint32_t* const positions = reinterpret_cast<uint32_t*>(sent.data_ptr<int32_t>());
    float* const values = reinterpret_cast<float*>(positions + kept_);
    select_largest(positions, kept_, error_.data(), error_.size());
    bool finite = false;
    for (size_t i = 0; i < kept_; ++i) {
      values[i] = std::exchange(error_[positions[i]], 0.0F);
      finite |= std::isfinite(values[i]);
    }
    // If all sent values are infinite or NaN, more such values may be left. They must not stay in the error.
    if (finite) return;
    for (float& value : error_) value = std::isfinite(value) ? value : 0;
  }
  void unpack(float* gradients, int size) const {
    std::fill_n(gradients, error_.size(), 0.0F);
    for (int r = 0; r < size; ++r) {
      const int32_t* const positions = received.const_data_ptr<int32_t>() + r * words();
      const float* const values = reinterpret_cast<const float*>(positions + kept_);
      for (size_t i = 0; i < kept_; ++i) {
        gradients[static_cast<uint32_t>(positions[i])] += values[i] / static_cast<float>(size);
      }
    }
  }

  at::Tensor sent, received;  ///< int32

 private:
  const size_t kept_;
  std::vector<float> error_;
};

class TopKHook final : public NativeHook {
 public:
  TopKHook(HookGroups groups, double ratio) : NativeHook(std::move(groups)), ratio_(ratio) {}

 private:
  HookFuture reduce(c10d::GradBucket& bucket) override {
    const at::Tensor& buffer = bucket.getBuffer();
    const std::shared_ptr<TopKBucket> state = states_.of(bucket, [&] { return make(buffer.numel()); });
    state->pack(buffer.const_data_ptr<float>());
    const Work work =
        group().all_gather({state->sent.data_ptr(), state->words(), Dtype::kInt32},
                           {state->received.data_ptr(), state->words() * size(), Dtype::kInt32}, {.async = true});
    return when_done(work, buffer, [state, buffer, size = size()] { state->unpack(buffer.data_ptr<float>(), size); });
  }
  std::shared_ptr<TopKBucket> make(int64_t count) const {
    const auto kept = static_cast<size_t>(std::ceil(ratio_ * static_cast<double>(count)));
    auto state = std::make_shared<TopKBucket>(count, kept);
    state->sent = message(state->words(), at::kInt);
    state->received = message(state->words() * size(), at::kInt);
    return state;
  }

  const double ratio_;
  BucketStates<TopKBucket> states_;
};

}  // namespace

void TopKOptions::check() const {
  check_argument(ratio > 0 && ratio <= 1, "top-k hook", "the ratio must be > 0 and <= 1, got ", ratio);
}

Hook top_k_hook(HookGroups groups, const TopKOptions& options) {
  options.check();
  return std::make_unique<TopKHook>(std::move(groups), options.ratio);
}

}  // namespace muster
