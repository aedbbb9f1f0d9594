#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "muster/torch/c10d/work.h"
#include "muster/torch/reducer/reducer.h"

namespace muster {

/// Parameters by bucket, in the order of reduction.
using BucketPlan = std::vector<std::vector<size_t>>;

/// Fills buckets with the parameters in the order given, a bucket for each dtype and device at a time, until they have
/// `limits` bytes: the first of a kind the first limit, and so on, the rest the last. A sparse parameter has a bucket
/// of its own. Buckets are in the order in which they become full.
BucketPlan plan_buckets(const std::vector<at::Tensor>& parameters, const std::vector<size_t>& order,
                        const std::vector<bool>& sparse, const std::vector<size_t>& limits);

/// Gradients of one dtype and device, one behind the other in one flat tensor, each at a multiple of 64 bytes unless a
/// hook is to see them without gaps; what lies between them is zero. Shared with the callbacks of its reduction, which
/// need its memory until they are done.
struct Bucket {
  std::vector<size_t> parameters;
  std::vector<size_t> offsets, lengths;  ///< by position, in elements
  std::vector<at::Tensor> variables;     ///< the parameters themselves
  size_t size = 0;                       ///< of the flat tensor, in elements
  at::Tensor flat;  ///< undefined before the first backward and where nothing is reduced; a sparse one's gradient
  bool sparse = false;

  // Of one backward.
  size_t pending = 0;    ///< gradients that have not come yet
  bool skipped = false;  ///< unused at all ranks, and not reduced
  std::optional<Work> work;
  c10::intrusive_ptr<c10::ivalue::Future> future;  ///< the hook's, in place of `work`
  std::optional<ProfilerEvent> event;
  BucketTimes times;
  std::atomic<int64_t> ended = 0;  ///< as `times.ended`, written by the thread that ends it

  /// The place of a gradient, with its parameter's shape and strides (if these are dense, else contiguous).
  at::Tensor& view(size_t position);
  /// The same within another tensor, laid out as `flat`.
  at::Tensor view_in(const at::Tensor& result, size_t position) const;
  /// Of the gradients, without what lies between them.
  size_t bytes() const;
  c10d::GradBucket grad_bucket(size_t index, size_t count, at::Tensor buffer) const;
  void begin_backward();

 private:
  std::vector<at::Tensor> views_;
};

/// Without memory. `sparse`: it is for one parameter's sparse gradient. `aligned`: gradients begin at multiples of 64
/// bytes.
std::shared_ptr<Bucket> make_bucket(const std::vector<at::Tensor>& parameters, std::vector<size_t> members, bool sparse,
                                    bool aligned);
/// A flat tensor of zeros, in the group's arena where it has one and the dtype can be reduced there. `dtype`: its own,
/// if not the parameters' and these are real.
at::Tensor make_flat(Group& group, const Bucket& bucket, std::optional<at::ScalarType> dtype);

/// Copies what has the same shape. Small dense tensors at a memcpy's cost.
void copy_gradient(at::Tensor& to, const at::Tensor& from);

}  // namespace muster
