#include <algorithm>
#include <cmath>

#include "muster/kernels/compress.h"
#include "muster/kernels/reduce.h"
#include "muster/torch/c10d/arguments.h"
#include "muster/torch/hooks/hooks_base.h"
#include "muster/torch/tensor.h"

namespace muster {
namespace {

/// A message has the positions of a rank's largest elements, then their values.
class TopKBucket {
 public:
  TopKBucket(size_t count, size_t kept, at::Tensor sent, at::Tensor received)
      : sent(std::move(sent)), received(std::move(received)), kept_(kept), error_(count) {}

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
      const int32_t* const positions = received.const_data_ptr<int32_t>() + r * 2 * kept_;
      const float* const values = reinterpret_cast<const float*>(positions + kept_);
      for (size_t i = 0; i < kept_; ++i) {
        gradients[static_cast<uint32_t>(positions[i])] += values[i] / static_cast<float>(size);
      }
    }
  }

  const at::Tensor sent, received;  ///< int32

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
    const std::shared_ptr<TopKBucket> state = states_.of(bucket, [&] {
      const auto kept = static_cast<size_t>(std::ceil(ratio_ * static_cast<double>(buffer.numel())));
      return std::make_shared<TopKBucket>(buffer.numel(), kept, message(2 * kept, at::kInt),
                                          message(2 * kept * size(), at::kInt));
    });
    state->pack(buffer.const_data_ptr<float>());
    const Work work = group().all_gather(value_or_throw(view_of(state->sent)), value_or_throw(view_of(state->received)),
                                         {.async = true});
    return when_done(work, buffer, [state, buffer, size = size()] { state->unpack(buffer.data_ptr<float>(), size); });
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
