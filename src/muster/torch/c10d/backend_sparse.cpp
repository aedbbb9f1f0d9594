#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "muster/torch/c10d/arguments.h"
#include "muster/torch/c10d/sparse.h"
#include "muster/torch/c10d/sync_call.h"

namespace muster {

ProcessGroupMuster::Handle ProcessGroupMuster::allreduce_sparse(Tensors& tensors,
                                                                const c10d::AllreduceOptions& options) {
  constexpr const char* kTitle = "all_reduce of sparse tensors";
  at::Tensor tensor = single_tensor(tensors, kTitle);
  check_argument(tensor.layout() == c10::kSparse && tensor.device().is_cpu(), kTitle,
                 "takes sparse COO tensors on the CPU");
  check_argument(!coalescing(), kTitle, "cannot be coalesced: call it outside of the coalescing block");
  const c10d::ReduceOp& op = options.reduceOp;
  check_argument(op.op_ == c10d::ReduceOp::SUM || op.op_ == c10d::ReduceOp::AVG, kTitle,
                 "only SUM and AVG are supported");
  const CallOptions how{.timeout = timeout_or_default(options.timeout)};
  TensorRequest request(c10d::OpType::_ALLREDUCE_SPARSE, "muster:all_reduce_sparse", /*async=*/false);
  SyncCallScope scope(*this, request, tensors);
  uint64_t sequence = 0;
  {
    const at::NoGradGuard no_grad;
    at::Tensor sum = sum_sparse(*group_, tensor, how, &sequence);
    if (op.op_ == c10d::ReduceOp::AVG) sum.div_(size_);
    tensor.copy_(sum);
  }
  scope.end({}, sequence);
  if (!options.asyncOp) return nullptr;
  request.outputs = tensors;
  auto work = c10::make_intrusive<TensorWork>(rank_, std::move(request), at::TensorList(), pending_);
  TensorWork::start(work, {}, sequence);
  return work;
}

}  // namespace muster
