#include "muster/torch/reducer/reducer_buckets.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "muster/torch/c10d/allocator.h"
#include "muster/torch/tensor.h"

namespace muster {
namespace {

/// A bucket that is being filled.
struct OpenBucket {
  std::vector<size_t> members;
  size_t bytes = 0;
  size_t limit = 0;  ///< its place in the list of limits
};

at::Tensor view_at(const at::Tensor& flat, const at::Tensor& like, size_t offset) {
  // Not a view in autograd's eyes, which would let nobody detach_() it: libtorch's Optimizer::zero_grad() does.
  const at::AutoDispatchBelowADInplaceOrView no_view;
  const at::Tensor part = flat.narrow(0, static_cast<int64_t>(offset), like.numel());
  return like.is_non_overlapping_and_dense() ? part.as_strided(like.sizes(), like.strides()) : part.view(like.sizes());
}

}  // namespace

BucketPlan plan_buckets(const std::vector<at::Tensor>& parameters, const std::vector<size_t>& order,
                        const std::vector<bool>& sparse, const std::vector<size_t>& limits) {
  using Kind = std::pair<c10::ScalarType, std::pair<c10::DeviceType, c10::DeviceIndex>>;
  std::map<Kind, OpenBucket> open;
  BucketPlan plan;
  std::vector<size_t> last;  // of each bucket: the place of its last parameter in the order
  for (size_t place = 0; place < order.size(); ++place) {
    const size_t index = order[place];
    if (!sparse.empty() && sparse[index]) {
      plan.push_back({index});
      continue;
    }
    const at::Tensor& parameter = parameters[index];
    OpenBucket& filling = open[{parameter.scalar_type(), {parameter.device().type(), parameter.device().index()}}];
    filling.members.push_back(index);
    filling.bytes += parameter.nbytes();
    if (filling.bytes < limits[filling.limit]) continue;
    plan.push_back(std::exchange(filling.members, {}));
    filling.bytes = 0;
    filling.limit = std::min(filling.limit + 1, limits.size() - 1);
  }
  for (auto& [kind, filling] : open) {
    if (!filling.members.empty()) plan.push_back(std::move(filling.members));
  }
  std::vector<size_t> places(parameters.size());
  for (size_t place = 0; place < order.size(); ++place) places[order[place]] = place;
  std::sort(plan.begin(), plan.end(),
            [&](const auto& a, const auto& b) { return places[a.back()] < places[b.back()]; });
  return plan;
}

std::shared_ptr<Bucket> make_bucket(const std::vector<at::Tensor>& parameters, std::vector<size_t> members, bool sparse,
                                    bool aligned) {
  constexpr size_t kAlignment = 64;
  auto bucket = std::make_shared<Bucket>();
  bucket->parameters = std::move(members);
  bucket->sparse = sparse;
  size_t end = 0;
  for (const size_t index : bucket->parameters) {
    const at::Tensor& variable = parameters[index];
    const size_t unit = aligned ? std::max<size_t>(1, kAlignment / variable.element_size()) : 1;
    bucket->variables.push_back(variable);
    bucket->offsets.push_back((end + unit - 1) / unit * unit);
    bucket->lengths.push_back(static_cast<size_t>(variable.numel()));
    end = bucket->offsets.back() + bucket->lengths.back();
  }
  bucket->size = end;
  return bucket;
}

at::Tensor make_flat(Group& group, const Bucket& bucket, std::optional<at::ScalarType> dtype) {
  const at::Tensor& like = bucket.variables.front();
  const auto type = dtype && like.is_floating_point() ? *dtype : like.scalar_type();
  const auto size = static_cast<int64_t>(bucket.size);
  const auto options = at::TensorOptions().device(like.device()).dtype(type);
  const auto arena = group.arena();
  const Result<Dtype> element = dtype_of(type);
  if (arena && like.device().is_cpu() && element && check_reducible(*element, ReduceOp::kAverage)) {
    try {
      return empty_in(arena, size, options).zero_();
    } catch (const c10::OutOfMemoryError&) {  // ordinary memory is slower, no more
    }
  }
  return at::zeros({size}, options);
}

at::Tensor& Bucket::view(size_t position) {
  if (views_.empty()) views_.resize(variables.size());
  at::Tensor& view = views_[position];
  // Whoever sets a gradient's .data replaces what the view, which is the gradient, refers to.
  if (!view.defined() || view.storage().unsafeGetStorageImpl() != flat.storage().unsafeGetStorageImpl()) {
    view = view_at(flat, variables[position], offsets[position]);
  }
  return view;
}

at::Tensor Bucket::view_in(const at::Tensor& result, size_t position) const {
  return view_at(result, variables[position], offsets[position]);
}

size_t Bucket::bytes() const {
  size_t sum = 0;
  for (const at::Tensor& variable : variables) {
    sum += static_cast<size_t>(variable.numel()) * (flat.defined() ? flat.element_size() : variable.element_size());
  }
  return sum;
}

c10d::GradBucket Bucket::grad_bucket(size_t index, size_t count, at::Tensor buffer) const {
  std::vector<c10::IntArrayRef> sizes;
  sizes.reserve(variables.size());
  for (const at::Tensor& variable : variables) sizes.push_back(variable.sizes());
  return c10d::GradBucket(index, count, std::move(buffer), offsets, lengths, std::move(sizes), variables, std::nullopt);
}

void Bucket::begin_backward() {
  pending = parameters.size();
  skipped = false;
  work.reset();
  future.reset();
  event.reset();
  times = {};
  ended = 0;
}

void copy_gradient(at::Tensor& to, const at::Tensor& from) {
  constexpr size_t kSmall = 256 << 10;  // beyond this copy_() may use several threads
  const bool same = from.layout() == c10::kStrided && from.device().is_cpu() && to.device().is_cpu() &&
                    from.scalar_type() == to.scalar_type() && from.strides() == to.strides() && !from.is_conj() &&
                    !from.is_neg() && to.is_non_overlapping_and_dense();
  if (same && to.nbytes() <= kSmall) {
    if (to.nbytes() > 0) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
  } else {
    to.copy_(from);
  }
}

}  // namespace muster
