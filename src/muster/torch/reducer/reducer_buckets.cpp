#include "muster/torch/reducer/reducer_buckets.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "muster/torch/c10d/allocator.h"
#include "muster/torch/c10d/device/device_group.h"
#include "muster/torch/c10d/sparse.h"
#include "muster/torch/tensor.h"

namespace muster {
namespace {

/// A bucket that is being filled.
struct OpenBucket {
  std::vector<size_t> members;
  size_t bytes = 0;
  size_t limit = 0;  ///< an index into the list of limits
};

/// Copies between tensors of the same shape; small dense ones by memcpy.
void copy_gradient(at::Tensor& to, const at::Tensor& from) {
  constexpr size_t kSmall = 256 << 10;  // for larger tensors copy_() may use several threads
  const bool same = from.layout() == c10::kStrided && from.device().is_cpu() && to.device().is_cpu() &&
                    from.scalar_type() == to.scalar_type() && from.strides() == to.strides() && !from.is_conj() &&
                    !from.is_neg() && to.is_non_overlapping_and_dense();
  if (same && to.nbytes() <= kSmall) {
    if (to.nbytes() > 0) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
  } else {
    to.copy_(from);
  }
}

}  // namespace

Group* ReducerContext::device_group() const {
  return options.device_group != nullptr ? options.device_group->formed() : nullptr;
}

Result<> ReducerContext::status() const {
  MUSTER_TRY(group->status());
  Group* const on_device = device_group();
  return on_device != nullptr ? on_device->status() : Result<>{};
}

void ReducerContext::abort(const Error& why) const {
  group->abort(why);
  if (Group* const on_device = device_group()) on_device->abort(why);
}

BucketPlan plan_buckets(const ReducerContext& context, const std::vector<size_t>& order) {
  using Kind = std::pair<c10::ScalarType, std::pair<c10::DeviceType, c10::DeviceIndex>>;
  const ReducerOptions& options = context.options;
  std::vector<size_t> limits = options.bucket_bytes_list;
  if (limits.empty()) limits = {options.first_bucket_bytes, options.bucket_bytes};
  std::map<Kind, OpenBucket> open;
  BucketPlan plan;
  std::vector<size_t> turns(order.size());  // by parameter: position of its gradient in `order`
  for (size_t turn = 0; turn < order.size(); ++turn) {
    const size_t index = order[turn];
    turns[index] = turn;
    if (context.is_sparse(index)) {
      plan.push_back({index});
      continue;
    }
    const at::Tensor& parameter = context.parameters[index];
    OpenBucket& bucket = open[{parameter.scalar_type(), {parameter.device().type(), parameter.device().index()}}];
    bucket.members.push_back(index);
    bucket.bytes += parameter.nbytes();
    if (bucket.bytes < limits[bucket.limit]) continue;
    plan.push_back(std::exchange(bucket.members, {}));
    bucket.bytes = 0;
    bucket.limit = std::min(bucket.limit + 1, limits.size() - 1);
  }
  for (auto& [kind, bucket] : open) {
    if (!bucket.members.empty()) plan.push_back(std::move(bucket.members));
  }
  std::sort(plan.begin(), plan.end(), [&](const auto& a, const auto& b) { return turns[a.back()] < turns[b.back()]; });
  return plan;
}

BucketLayout::BucketLayout(const ReducerContext& context, std::vector<size_t> members, bool aligned)
    : parameters(std::move(members)), sparse(context.is_sparse(parameters.front())) {
  constexpr size_t kAlignment = 64;
  for (const size_t index : parameters) {
    const at::Tensor& variable = context.parameters[index];
    const size_t unit = aligned ? std::max<size_t>(1, kAlignment / variable.element_size()) : 1;
    variables.push_back(variable);
    offsets.push_back((size + unit - 1) / unit * unit);
    size = offsets.back() + static_cast<size_t>(variable.numel());
  }
}

at::Tensor BucketLayout::zeros(const ReducerContext& context) const {
  const at::Tensor& like = variables.front();
  if (sparse) return empty_sparse_like(like);
  const auto type =
      like.is_floating_point() ? context.options.reduction_dtype.value_or(like.scalar_type()) : like.scalar_type();
  const auto length = static_cast<int64_t>(size);
  const auto options = at::TensorOptions().device(like.device()).dtype(type);
  const auto arena = context.group->arena();
  const Result<Dtype> element = dtype_of(type);
  if (arena && like.device().is_cpu() && element && check_reducible(*element, ReduceOp::kAverage)) {
    try {
      return empty_in(arena, length, options).zero_();
    } catch (const c10::OutOfMemoryError&) {  // ordinary memory works too; it is only slower
    }
  }
  return at::zeros({length}, options);
}

at::Tensor BucketLayout::view_in(const at::Tensor& buffer, size_t position) const {
  // Autograd must not treat the result as a view: it forbids detach_() on views, and libtorch's Optimizer::zero_grad()
  // calls detach_().
  const at::AutoDispatchBelowADInplaceOrView no_view;
  const at::Tensor& like = variables[position];
  const at::Tensor part = buffer.narrow(0, static_cast<int64_t>(offsets[position]), like.numel());
  return like.is_non_overlapping_and_dense() ? part.as_strided(like.sizes(), like.strides()) : part.view(like.sizes());
}

void Bucket::begin_backward() {
  pending = parameters.size();
  skipped = false;
  work.reset();
  device_work.reset();
  future.reset();
  event.reset();
  times = {};
  ended = 0;
}

at::Tensor& Bucket::view(size_t position) {
  if (views_.empty()) views_.resize(variables.size());
  at::Tensor& view = views_[position];
  // A program that sets a gradient's .data replaces the storage of the view, because the view is the gradient.
  if (!view.defined() || view.storage().unsafeGetStorageImpl() != buffer.storage().unsafeGetStorageImpl()) {
    view = view_in(buffer, position);
  }
  return view;
}

size_t Bucket::bytes() const {
  size_t sum = 0;
  for (const at::Tensor& variable : variables) {
    sum += static_cast<size_t>(variable.numel()) * (buffer.defined() ? buffer.element_size() : variable.element_size());
  }
  return sum;
}

void GradientBuckets::build(const BucketPlan& plan, bool aligned) {
  all_.clear();  // first, so that the new buckets may get this memory
  slots_.resize(context_.parameters.size());
  for (const auto& members : plan) {
    for (size_t position = 0; position < members.size(); ++position) {
      slots_[members[position]] = {all_.size(), position};
    }
    all_.push_back(std::make_shared<Bucket>(context_, members, aligned));
  }
  begin_backward();
}

void GradientBuckets::allocate() {
  for (const auto& bucket : all_) {
    if (bucket->sparse || bucket->buffer.defined()) continue;
    bucket->buffer = bucket->zeros(context_);
    if (!context_.options.gradient_as_bucket_view) continue;
    for (size_t position = 0; position < bucket->variables.size(); ++position) {
      if (bucket->variables[position].grad().defined()) store_dense(*bucket, position);
    }
  }
}

void GradientBuckets::begin_backward() {
  for (const auto& bucket : all_) bucket->begin_backward();
}

Bucket& GradientBuckets::store(size_t index) {
  const BucketSlot& slot = slots_[index];
  Bucket& bucket = *all_[slot.bucket];
  if (bucket.pending == bucket.parameters.size()) bucket.times.first_ready = steady_clock().now();
  if (bucket.sparse) {
    store_sparse(bucket);
  } else if (bucket.buffer.defined()) {
    store_dense(bucket, slot.position);
  }
  if (--bucket.pending == 0) {
    bucket.times.ready = steady_clock().now();
    bucket.times.last_parameter = index;
  }
  return bucket;
}

void GradientBuckets::store_dense(Bucket& bucket, size_t position) {
  at::Tensor& gradient = bucket.variables[position].mutable_grad();
  at::Tensor& view = bucket.view(position);
  if (!gradient.defined()) {
    view.zero_();
    return;
  }
  if (gradient.is_same(view)) return;
  const size_t index = bucket.parameters[position];
  TORCH_CHECK(gradient.layout() == c10::kStrided, "Expected a dense gradient of parameter ", context_.name_of(index),
              ", got a ", gradient.layout(), " one: declare the parameter as sparse when the reducer is made");
  TORCH_CHECK(context_.options.reduction_dtype || gradient.scalar_type() == view.scalar_type(),
              "Expected a gradient of ", view.scalar_type(), " for parameter ", context_.name_of(index), ", got ",
              gradient.scalar_type(), ": a parameter's dtype may not change after the reducer is made");
  if (!gradient.is_alias_of(view) || gradient.const_data_ptr() != view.const_data_ptr()) copy_gradient(view, gradient);
  if (hands_out_views(bucket, position)) gradient = view;
}

void GradientBuckets::store_sparse(Bucket& bucket) {
  const at::Tensor& gradient = bucket.variables.front().grad();
  TORCH_CHECK(!gradient.defined() || gradient.is_sparse(), "Expected variable to have sparse gradient: parameter ",
              context_.name_of(bucket.parameters.front()), " has a dense one");
  bucket.buffer = gradient.defined() ? gradient : bucket.zeros(context_);
}

/// True if gradients are views of the bucket. False if the reduction has another dtype than the parameter: then the
/// gradient has memory of its own.
bool GradientBuckets::hands_out_views(const Bucket& bucket, size_t position) const {
  return context_.options.gradient_as_bucket_view &&
         bucket.buffer.scalar_type() == bucket.variables[position].scalar_type();
}

void GradientBuckets::hand_out(Bucket& bucket, const at::Tensor& result, const UsedParameters& used) {
  bool separate = bucket.sparse;
  if (!bucket.sparse && bucket.buffer.defined() && !result.is_alias_of(bucket.buffer)) {
    // A hook may return another dtype, such as that of the parameters.
    separate = result.scalar_type() != bucket.buffer.scalar_type();
    if (!separate) bucket.buffer.copy_(result.view(-1));
  }
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    if (!used.globally_unused(bucket.parameters[i])) finalize_gradient(bucket, i, separate ? &result : nullptr);
  }
}

/// `result` is null if the result is in the bucket's buffer.
void GradientBuckets::finalize_gradient(Bucket& bucket, size_t position, const at::Tensor* result) {
  at::Tensor& variable = bucket.variables[position];
  at::Tensor& gradient = variable.mutable_grad();
  if (bucket.sparse) {
    if (!gradient.defined()) gradient = *result;
    if (!gradient.is_same(*result)) gradient.copy_(*result);
    return;
  }
  if (!bucket.buffer.defined()) {
    if (!gradient.defined()) gradient = at::zeros_like(variable);
    return;
  }
  at::Tensor& view = bucket.view(position);
  if (result == nullptr) {
    if (gradient.is_same(view)) return;
    if (hands_out_views(bucket, position)) {
      gradient = view;
      return;
    }
  }
  const at::Tensor source = result != nullptr ? bucket.view_in(*result, position) : view;
  if (gradient.defined()) {
    copy_gradient(gradient, source);
  } else {
    gradient = torch::autograd::utils::clone_obey_contract(source.to(variable.scalar_type()), variable);
  }
}

std::vector<size_t> GradientBuckets::bytes() const {
  std::vector<size_t> all;
  for (const auto& bucket : all_) all.push_back(bucket->bytes());
  return all;
}

BucketPlan GradientBuckets::plan() const {
  BucketPlan plan;
  for (const auto& bucket : all_) plan.push_back(bucket->parameters);
  return plan;
}

}  // namespace muster
