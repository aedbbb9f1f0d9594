#include <algorithm>

#include "muster/base/random.h"
#include "muster/kernels/compress.h"
#include "muster/kernels/reduce.h"
#include "muster/torch/c10d/arguments.h"
#include "muster/torch/hooks/hooks_base.h"
#include "muster/torch/tensor.h"

namespace muster {
namespace {

/// The positions of a compressed gradient and of its factors P and Q.
struct Matrix {
  size_t begin = 0;  ///< in the bucket
  size_t rows = 0, columns = 0, rank = 0;
  size_t p = 0, q = 0;  ///< in the first and the second message
  size_t count() const { return rows * columns; }
};
/// Elements that are sent as they are.
struct UncompressedRange {
  size_t begin = 0, count = 0;
};

/// x * 0 is NaN if x is infinite or NaN.
bool all_finite(const float* data, size_t count) {
  float sum = 0;
  for (size_t i = 0; i < count; ++i) sum += data[i] * 0;
  return sum == 0;
}

class PowerSgdBucket {
 public:
  /// `message(count)` makes a message of that many elements.
  template <class MakeMessage>
  PowerSgdBucket(const c10d::GradBucket& bucket, const PowerSgdOptions& options, MakeMessage message)
      : random_(options.seed + bucket.getIndex()), error_(bucket.getBuffer().numel()) {
    find_matrices(bucket, options);
    size_t first_count = find_ranges(), second_count = 0;
    for (Matrix& m : matrices_) {
      m.p = std::exchange(first_count, first_count + m.rows * m.rank);
      m.q = std::exchange(second_count, second_count + m.columns * m.rank);
    }
    first = message(first_count);
    second = message(second_count);
  }

  bool compresses() const { return !matrices_.empty(); }

  /// Writes the first message: uncompressed ranges, and the matrices times their Q.
  void pack(const float* gradients) {
    float* to = first.data_ptr<float>();
    for (const UncompressedRange& range : ranges_) to = std::copy_n(gradients + range.begin, range.count, to);
    for (const Matrix& m : matrices_) {
      float* const q = second.data_ptr<float>() + m.q;
      float* const corrected = error_.data() + m.begin;
      init_q(q, m);
      reduce_into(corrected, gradients + m.begin, m.count(), Dtype::kFloat32, ReduceOp::kSum);
      project_rows(first.data_ptr<float>() + m.p, corrected, q, m.rows, m.columns, m.rank);
    }
  }
  /// Writes the second message: the matrices, projected on the orthogonalized average of the first message.
  void project() {
    for (const Matrix& m : matrices_) {
      float* const p = first.data_ptr<float>() + m.p;
      orthogonalize(p, m.rows, m.rank);
      project_columns(second.data_ptr<float>() + m.q, error_.data() + m.begin, p, m.rows, m.columns, m.rank);
    }
  }
  void unpack(float* gradients) {
    const float* from = first.const_data_ptr<float>();
    for (const UncompressedRange& range : ranges_) {
      std::copy_n(from, range.count, gradients + range.begin);
      from += range.count;
    }
    for (const Matrix& m : matrices_) {
      float* const q = second.data_ptr<float>() + m.q;
      float* const error = error_.data() + m.begin;
      expand(gradients + m.begin, error, first.const_data_ptr<float>() + m.p, q, m.rows, m.columns, m.rank);
      // Infinities and NaN are in the result at all ranks. They must not stay in the state, or all later steps would
      // have them.
      if (all_finite(q, m.rank * m.columns)) continue;
      std::fill_n(q, m.rank * m.columns, 0.0F);
      std::fill_n(error, m.count(), 0.0F);
    }
  }

  at::Tensor first, second;  ///< the messages; the second one keeps Q for the next step

 private:
  void find_matrices(const c10d::GradBucket& bucket, const PowerSgdOptions& options) {
    const auto* const start = bucket.getBuffer().const_data_ptr<float>();
    for (const at::Tensor& gradient : bucket.getGradients()) {
      if (gradient.dim() < 2 || gradient.numel() == 0) continue;
      Matrix m;
      m.begin = gradient.const_data_ptr<float>() - start;
      m.rows = gradient.size(0);
      m.columns = gradient.numel() / m.rows;
      m.rank = std::min({options.rank, m.rows, m.columns});
      const auto sent = static_cast<double>((m.rows + m.columns) * m.rank);
      if (sent * options.min_compression_rate <= static_cast<double>(m.count())) matrices_.push_back(m);
    }
    std::sort(matrices_.begin(), matrices_.end(), [](const Matrix& a, const Matrix& b) { return a.begin < b.begin; });
  }
  /// Finds the elements between the matrices. Returns their number.
  size_t find_ranges() {
    size_t end = 0, count = error_.size();
    for (const Matrix& m : matrices_) {
      ranges_.push_back({end, m.begin - end});
      end = m.begin + m.count();
      count -= m.count();
    }
    ranges_.push_back({end, error_.size() - end});
    return count;
  }
  /// Fills the zero rows of Q with random numbers, the same at all ranks: at the start, and where the gradient had a
  /// lower rank.
  void init_q(float* q, const Matrix& m) {
    for (size_t k = 0; k < m.rank; ++k, q += m.columns) {
      if (std::any_of(q, q + m.columns, [](float value) { return value != 0; })) continue;
      std::generate_n(q, m.columns, [this] { return static_cast<float>(random_.uniform() - 0.5); });
    }
  }

  Random random_;
  std::vector<float> error_;  ///< during a step: the gradients plus the last step's error; between steps: the error
  std::vector<Matrix> matrices_;
  std::vector<UncompressedRange> ranges_;
};

class PowerSgdHook final : public TwoPhaseHook {
 public:
  PowerSgdHook(HookGroups groups, const PowerSgdOptions& options)
      : TwoPhaseHook(std::move(groups)), options_(options) {}

 private:
  HookFuture reduce(c10d::GradBucket& bucket) override {
    const at::Tensor& buffer = bucket.getBuffer();
    const uint64_t step = bucket.isLast() ? steps_++ : steps_;
    if (step < options_.start_powerSGD_iter) return average(buffer);
    const std::shared_ptr<PowerSgdBucket> state = states_.of(bucket, [&] {
      return std::make_shared<PowerSgdBucket>(bucket, options_,
                                              [this](size_t count) { return message(count, at::kFloat); });
    });
    if (!state->compresses()) return average(buffer);
    state->pack(buffer.const_data_ptr<float>());
    const BufferView first = value_or_throw(view_of(state->first)), last = value_or_throw(view_of(state->second));
    return then(
        group().all_reduce(first, ReduceOp::kAverage, {.async = true}), buffer, [state] { state->project(); },
        [last](Group& group) { return group.all_reduce(last, ReduceOp::kAverage); },
        [state, buffer] { state->unpack(buffer.data_ptr<float>()); });
  }

  const PowerSgdOptions options_;
  uint64_t steps_ = 0;  ///< steps whose last bucket was reduced
  BucketStates<PowerSgdBucket> states_;
};

}  // namespace

void PowerSgdOptions::check() const {
  check_argument(rank > 0, "PowerSGD hook", "the rank must be > 0");
  check_argument(min_compression_rate >= 1, "PowerSGD hook", "min_compression_rate must be >= 1, got ",
                 min_compression_rate);
}

Hook power_sgd_hook(HookGroups groups, const PowerSgdOptions& options) {
  options.check();
  return std::make_unique<PowerSgdHook>(std::move(groups), options);
}

}  // namespace muster
