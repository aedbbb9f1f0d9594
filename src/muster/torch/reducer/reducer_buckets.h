#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "muster/torch/c10d/work.h"
#include "muster/torch/reducer/reducer.h"
#include "muster/torch/reducer/reducer_unused.h"

namespace muster {

/// The data that all parts of a Reducer read. Only Reducer::Impl changes it, between backwards.
struct ReducerContext {
  std::shared_ptr<Group> group;
  std::vector<at::Tensor> parameters;
  ReducerOptions options;

  Rank rank() const { return group->membership().rank; }
  int size() const { return group->membership().size; }
  /// The group on the device; null if there is none.
  Group* device_group() const;
  /// Success unless one of both groups has failed.
  Result<> status() const;
  /// Ends both groups at all ranks.
  void abort(const Error& why) const;
  bool is_sparse(size_t index) const { return !options.sparse.empty() && options.sparse[index]; }
  /// The parameter's number and name for messages, such as "3 (body.weight)".
  std::string name_of(size_t index) const;
  /// Collective. Throws at every rank unless all ranks have the same parameters and buffers: equal in number, name,
  /// shape, strides, dtype, device type and whether they require gradients. The error names the first rank that differs
  /// from rank 0, the first of its tensors that differs, and the tensor's description at both ranks. Costs one small
  /// exchange if all ranks have the same model. Compares options.model_parameters and model_buffers, or `parameters` if
  /// there are none.
  void verify_model() const;
};

/// Parameters by bucket, in the order of reduction.
using BucketPlan = std::vector<std::vector<size_t>>;

/// Fills buckets with the parameters in the given order, one bucket for each dtype and device at a time, until a bucket
/// has the bytes that the options allow. For each dtype and device, the first limit applies to the first bucket, and so
/// on; the last limit applies to all further buckets. A sparse parameter has a bucket of its own. Buckets are in the
/// order in which they become full.
BucketPlan plan_buckets(const ReducerContext& context, const std::vector<size_t>& order);

/// The positions of some parameters' gradients in one buffer. The gradients lie one after the other, each at a multiple
/// of 64 bytes. If a user's hook reads the buffer, they are not aligned, because such a hook expects no gaps. Gaps are
/// zero.
struct BucketLayout {
  std::vector<size_t> parameters;
  std::vector<at::Tensor> variables;  ///< the parameters themselves
  std::vector<size_t> offsets;        ///< by position, in elements
  size_t size = 0;                    ///< of the buffer, in elements
  bool sparse = false;                ///< one parameter, whose sparse gradient replaces the buffer

  BucketLayout(const ReducerContext& context, std::vector<size_t> members, bool aligned);
  /// The gradient at `position` of a buffer, with its parameter's shape and strides (contiguous if these are not
  /// dense).
  at::Tensor view_in(const at::Tensor& buffer, size_t position) const;
  /// Zeros: sparse, or dense in the group's arena if it has one that reduces the dtype.
  at::Tensor zeros(const ReducerContext& context) const;
};

/// One bucket and its reduction in the current backward. Shared with the callbacks of that reduction, which need the
/// buffer until they are done.
struct Bucket : BucketLayout {
  using BucketLayout::BucketLayout;

  /// Undefined before the first backward, and at a single rank without a hook. In a sparse bucket it is the parameter's
  /// gradient.
  at::Tensor buffer;
  size_t pending = 0;    ///< gradients that have not arrived yet
  bool skipped = false;  ///< not reduced, as no rank uses its parameters
  std::optional<Work> work;
  c10::intrusive_ptr<TensorWork> device_work;      ///< of a buffer on a device, used instead of `work`
  c10::intrusive_ptr<c10::ivalue::Future> future;  ///< the hook's future, used instead of `work`
  std::optional<ProfilerEvent> event;
  BucketTimes times;
  /// The value of `times.ended` in ns. Zero until the thread that completes the reduction writes it. It is atomic
  /// because the reducer may read it at that time; no other data is published through it.
  std::atomic<int64_t> ended = 0;

  void begin_backward();
  at::Tensor& view(size_t position);
  size_t bytes() const;

 private:
  std::vector<at::Tensor> views_;
};

/// A reducer's buckets: moves gradients into them, and the results back to the parameters.
class GradientBuckets {
 public:
  explicit GradientBuckets(const ReducerContext& context) : context_(context) {}

  /// Replaces all buckets; they have no memory yet.
  void build(const BucketPlan& plan, bool aligned);
  /// Gives buckets their buffers. Called late, because the program may first send the model to all ranks.
  void allocate();
  void begin_backward();
  /// Moves the parameter's gradient into its bucket, or zeros if it has none. Returns the bucket.
  Bucket& store(size_t index);
  /// Turns `result`, the reduced buffer, into the gradients of the bucket's parameters, except those that no rank used.
  void hand_out(Bucket& bucket, const at::Tensor& result, const UsedParameters& used);

  BucketPlan plan() const;
  /// By bucket: bytes of the gradients, without gaps.
  std::vector<size_t> bytes() const;
  const std::vector<std::shared_ptr<Bucket>>& all() const { return all_; }
  size_t index_of(const Bucket& bucket) const { return slots_[bucket.parameters.front()].bucket; }

 private:
  struct BucketSlot {
    size_t bucket = 0, position = 0;
  };

  void store_dense(Bucket& bucket, size_t position);
  void store_sparse(Bucket& bucket);
  bool hands_out_views(const Bucket& bucket, size_t position) const;
  void finalize_gradient(Bucket& bucket, size_t position, const at::Tensor* result);

  const ReducerContext& context_;
  std::vector<std::shared_ptr<Bucket>> all_;  // shared with the callbacks of their reductions
  std::vector<BucketSlot> slots_;             ///< by parameter
};

}  // namespace muster
