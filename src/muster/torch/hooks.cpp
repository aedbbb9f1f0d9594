#include "muster/torch/hooks.h"

#include <c10/util/StringUtil.h>

#include <future>
#include <numeric>
#include <utility>

#include "muster/group/hold_store.h"
#include "muster/kernels/compress.h"
#include "muster/torch/c10d/allocator.h"
#include "muster/torch/c10d/arguments.h"
#include "muster/torch/c10d/device/staging.h"
#include "muster/torch/collectives.h"
#include "muster/torch/exception.h"
#include "muster/torch/hooks/hooks_base.h"
#include "muster/torch/tensor.h"

namespace muster {

HookGroups hook_groups(std::shared_ptr<Group> group, std::shared_ptr<Store> store) {
  if (store == nullptr) store = job_store();
  std::vector<Rank> ranks(static_cast<size_t>(group->membership().size));
  std::iota(ranks.begin(), ranks.end(), 0);
  const std::string name = c10::str("hook.", group->sequence());  // unique, and the same at all ranks
  barrier(*group);
  auto secondary = value_or_throw(group->split(*store, ranks, name));
  return {std::move(group), hold_store(std::move(store), std::move(secondary))};
}

c10d::GradBucket bucket_at(size_t index, size_t count, const at::Tensor& buffer, std::vector<size_t> offsets,
                           const std::vector<at::Tensor>& parameters) {
  std::vector<size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  for (const at::Tensor& parameter : parameters) {
    lengths.push_back(static_cast<size_t>(parameter.numel()));
    sizes.push_back(parameter.sizes());
  }
  return c10d::GradBucket(index, count, buffer, std::move(offsets), std::move(lengths), std::move(sizes), parameters,
                          std::nullopt);
}

c10d::GradBucket bucket_of(size_t index, size_t count, const at::Tensor& flat,
                           const std::vector<at::Tensor>& parameters) {
  std::vector<size_t> offsets;
  size_t end = 0;
  for (const at::Tensor& parameter : parameters) offsets.push_back(std::exchange(end, end + parameter.numel()));
  check_argument(end == static_cast<size_t>(flat.numel()), "bucket", "the parameters have ", end,
                 " elements, but the tensor has ", flat.numel());
  return bucket_at(index, count, flat, std::move(offsets), parameters);
}

HookFuture new_future() { return c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get()); }

bool wait_until(const HookFuture& future, const Deadline& deadline) {
  if (future->completed()) return true;
  const auto promise = std::make_shared<std::promise<void>>();  // shared: the future may complete after the deadline
  const std::future<void> completed = promise->get_future();
  future->addCallback([promise](c10::ivalue::Future&) { promise->set_value(); });
  return completed.wait_for(deadline.left()) == std::future_status::ready;
}

void complete(const HookFuture& future, const Result<>& result, c10::IValue value) {
  if (result) {
    future->markCompleted(std::move(value));
  } else {
    future->setError(to_exception(result.error()));
  }
}

NativeHook::NativeHook(HookGroups groups) : CppCommHookInterface(std::move(groups)) {
  check_argument(state_.group != nullptr, "communication hook", "HookGroups::group is null");
}

HookFuture NativeHook::runHook(c10d::GradBucket& bucket) {
  at::Tensor buffer = bucket.getBuffer();
  check_argument(!buffer.is_sparse(), "communication hook",
                 "muster's hooks take dense gradients: register no hook for a model with sparse ones");
  if (!buffer.device().is_cpu()) {
    buffer = host_buffer(buffer).copy_(buffer);  // waits for the kernels that fill the bucket
    bucket.setBuffer(buffer);
  }
  if (size() > 1 && buffer.scalar_type() == at::kFloat && buffer.numel() > 0) {
    value_or_throw(view_of(buffer));
    return reduce(bucket);
  }
  return average(buffer);
}

HookFuture NativeHook::average(const at::Tensor& buffer) const {
  if (size() == 1 || buffer.numel() == 0) {
    const HookFuture future = new_future();
    future->markCompleted(buffer);
    return future;
  }
  return when_done(group().all_reduce(value_or_throw(view_of(buffer)), ReduceOp::kAverage, {.async = true}), buffer,
                   [] {});
}

at::Tensor NativeHook::message(size_t count, at::ScalarType dtype) const {
  const auto arena = group().arena();
  const auto length = static_cast<int64_t>(count);
  if (arena == nullptr) return at::zeros({length}, dtype);
  return empty_in(arena, length, dtype).zero_();
}

TwoPhaseHook::TwoPhaseHook(HookGroups groups) : NativeHook(groups) {
  check_argument(groups.secondary_group != nullptr || size() == 1, "communication hook",
                 "it needs a second group of the same ranks: set HookGroups::secondary_group");
}

TwoPhaseHook::~TwoPhaseHook() {
  if (last_ && !last_->completed())
    secondary()->abort({ErrorCode::kAborted, "its communication hook was destroyed", rank()});
}

namespace {

class AllReduceHook final : public NativeHook {
 public:
  using NativeHook::NativeHook;

 private:
  HookFuture reduce(c10d::GradBucket& bucket) override { return average(bucket.getBuffer()); }
};

class HalfCompressHook final : public NativeHook {
 public:
  HalfCompressHook(HookGroups groups, at::ScalarType wire)
      : NativeHook(std::move(groups)), wire_(wire), dtype_(value_or_throw(dtype_of(wire))) {
    check_argument(wire == at::kHalf || wire == at::kBFloat16, "half_compress hook",
                   "the wire dtype must be float16 or bfloat16, got ", wire);
  }

 private:
  HookFuture reduce(c10d::GradBucket& bucket) override {
    const at::Tensor& buffer = bucket.getBuffer();
    const auto count = static_cast<size_t>(buffer.numel());
    const std::shared_ptr<at::Tensor> halves =
        wire_buffer_.of(bucket, [&] { return std::make_shared<at::Tensor>(message(count, wire_)); });
    narrow(halves->data_ptr(), buffer.const_data_ptr<float>(), count, dtype_, 1.0F / static_cast<float>(size()));
    const Work work = group().all_reduce({halves->data_ptr(), count, dtype_}, ReduceOp::kSum, {.async = true});
    return when_done(work, buffer, [buffer, halves, count, dtype = dtype_] {
      widen(buffer.data_ptr<float>(), halves->const_data_ptr(), count, dtype);
    });
  }

  const at::ScalarType wire_;
  const Dtype dtype_;
  BucketStates<at::Tensor> wire_buffer_;
};

}  // namespace

Hook all_reduce_hook(HookGroups groups) { return std::make_unique<AllReduceHook>(std::move(groups)); }
Hook half_compress_hook(HookGroups groups, at::ScalarType wire) {
  return std::make_unique<HalfCompressHook>(std::move(groups), wire);
}

}  // namespace muster
