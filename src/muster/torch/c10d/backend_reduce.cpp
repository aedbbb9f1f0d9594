#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <numeric>
#include <utility>

#include "muster/kernels/reduce.h"
#include "muster/torch/c10d/arguments.h"
#include "muster/torch/c10d/sparse.h"
#include "muster/torch/c10d/sync_call.h"
#include "muster/torch/c10d/torch_versions.h"
#include "muster/torch/tensor.h"

namespace muster {
namespace {

constexpr const char* kReduceScatter = "reduce_scatter";

void set_reduction(Operation& operation, const c10d::ReduceOp& op) {
  const Reduction reduction = reduction_of(op);
  operation.call.op = reduction.op;
  operation.factor = reduction.factor;
}

/// Reduces this rank's tensors to one tensor. The call then reduces that tensor over the ranks, and copies the result
/// to each of this rank's tensors.
BufferView combine_locally(TensorRequest& request, const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op) {
  check_alike(tensors, "all_reduce");
  const Reduction reduction = reduction_of(op);
  check_argument(reduction.op != ReduceOp::kAverage && reduction.op != ReduceOp::kPremulSum, "all_reduce",
                 "AVG and PREMUL_SUM take one tensor per rank, got ", tensors.size());
  const at::NoGradGuard no_grad;
  const at::Tensor all = tensors.front().cpu().clone(at::MemoryFormat::Contiguous);
  const BufferView view = request.in_place(all);
  value_or_throw(check_reducible(view.dtype(), reduction.op));
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_same(tensors.front())) {
      const at::Tensor plain = tensor.cpu().contiguous();
      reduce_into(all.mutable_data_ptr(), plain.const_data_ptr(), view.count(), view.dtype(), reduction.op);
    }
    request.copy_at_end(tensor, all);
  }
  return view;
}

}  // namespace

ProcessGroupMuster::Handle ProcessGroupMuster::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  TensorRequest request = this->request(OpType::ALLREDUCE, "muster:all_reduce", options.asyncOp, tensors);
  check_argument(!tensors.empty(), "all_reduce", "the list of tensors is empty");
  if (tensors.front().layout() == c10::kSparse) return allreduce_sparse(tensors, options);
  BufferView data;
  if (tensors.size() > 1) {
    data = combine_locally(request, tensors, options.reduceOp);
  } else {
    // The calls of a coalescing block are joined: then the copies of all come first.
    data = coalescing() ? request.in_place(tensors.front()) : request.in_place_by_pieces(tensors.front());
  }
  set_reduction(request.add(Collective::kAllReduce, data, data), options.reduceOp);
  return launch(std::move(request), tensors, options.timeout);
}

ProcessGroupMuster::Handle ProcessGroupMuster::allreduce_coalesced(Tensors& tensors,
                                                                   const c10d::AllreduceCoalescedOptions& options) {
  TensorRequest request = this->request(OpType::ALLREDUCE_COALESCED, "muster:all_reduce", options.asyncOp, tensors);
  for (const at::Tensor& tensor : tensors) {
    value_or_throw(check_dense(tensor));
    check_argument(tensor.scalar_type() == tensors.front().scalar_type(), "all_reduce_coalesced",
                   "tensors must all have the same type, but one is ", tensors.front().scalar_type(), " and another ",
                   tensor.scalar_type());
  }
  const auto add = [&](BufferView data) {
    set_reduction(request.add(Collective::kAllReduce, data, data), options.reduceOp);
  };
  if (!tensors.empty() && (tensors.front().is_cpu() || TensorRequest::share_memory(tensors))) {
    add(request.in_place(tensors));
  } else {
    for (const at::Tensor& each : tensors) add(request.in_place(each));  // one kernel of NCCL, without a copy
  }
  return launch(std::move(request), tensors, options.timeout);
}

ProcessGroupMuster::Handle ProcessGroupMuster::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  TensorRequest request = this->request(OpType::REDUCE, "muster:reduce", options.asyncOp, tensors);
  const at::Tensor& tensor = single_tensor(tensors, "reduce");
  const Rank root = check_rank(options.rootRank, size_, "reduce");
  BufferView data = rank_ == root ? request.in_place(tensor) : request.read(tensor);
  Operation& operation = request.add(Collective::kReduce, data, data);
  set_reduction(operation, options.reduceOp);
  operation.call.root = root;
  return launch(std::move(request), tensors, options.timeout);
}

ProcessGroupMuster::Handle ProcessGroupMuster::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                              const c10d::ReduceScatterOptions& options) {
  TensorRequest request = this->request(OpType::REDUCE_SCATTER, "muster:reduce_scatter", options.asyncOp, outputs);
  const at::Tensor& output = single_tensor(outputs, kReduceScatter);
  const Tensors& list = single_list(inputs, kReduceScatter);
  check_list(list, output, size_, kReduceScatter, "input");
  check_argument(list[rank_].numel() == output.numel(), kReduceScatter, "input ", rank_, " has ", list[rank_].numel(),
                 " elements, but this rank's output has ", output.numel());
  std::vector<size_t> counts = counts_of(list);
  const size_t own = std::accumulate(counts.begin(), counts.begin() + rank_, size_t{0}) * output.element_size();
  if (all_equal(counts)) counts.clear();
  Operation& operation =
      request.add_disjoint(Collective::kReduceScatter, request.read(list), request.write(output), own);
  set_reduction(operation, options.reduceOp);
  operation.counts = std::move(counts);
  return launch(std::move(request), list, options.timeout);
}

ProcessGroupMuster::Handle ProcessGroupMuster::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                    const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

ProcessGroupMuster::Handle ProcessGroupMuster::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  constexpr const char* kTitle = "reduce_scatter_tensor";
  TensorRequest request = this->request(inputs.size() == 1 ? OpType::_REDUCE_SCATTER_BASE : kReduceScatterTensors,
                                        "muster:reduce_scatter_tensor", options.asyncOp, outputs);
  check_argument(outputs.size() == inputs.size(), kTitle, "outputs and inputs must have the same number of tensors");
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_divisible(inputs[i], outputs[i], size_, kTitle);
    BufferView output = request.write(outputs[i]);
    const size_t own = rank_ * output.bytes();
    set_reduction(request.add_disjoint(Collective::kReduceScatter, request.read(inputs[i]), std::move(output), own),
                  options.reduceOp);
  }
  return launch(std::move(request), inputs, options.timeout);
}

ProcessGroupMuster::Handle ProcessGroupMuster::allreduce_sparse(Tensors& tensors,
                                                                const c10d::AllreduceOptions& options) {
  constexpr const char* kTitle = "all_reduce of sparse tensors";
  at::Tensor tensor = single_tensor(tensors, kTitle);
  check_argument(tensor.layout() == c10::kSparse, kTitle, "takes sparse COO tensors");
  check_argument(!coalescing(), kTitle, "cannot be coalesced: call it outside of the coalescing block");
  const c10d::ReduceOp& op = options.reduceOp;
  check_argument(op.op_ == c10d::ReduceOp::SUM || op.op_ == c10d::ReduceOp::AVG, kTitle,
                 "only SUM and AVG are supported");
  const CallOptions how{.timeout = timeout_or_default(options.timeout)};
  TensorRequest request(OpType::_ALLREDUCE_SPARSE, "muster:all_reduce_sparse", /*async=*/false);
  SyncCallScope scope(*this, request, tensors);
  uint64_t sequence = 0;
  {
    const at::NoGradGuard no_grad;
    at::Tensor sum = sum_sparse(*group_, tensor.cpu(), how, &sequence);
    if (op.op_ == c10d::ReduceOp::AVG) sum.div_(size_);
    tensor.copy_(sum.to(tensor.device()));
  }
  scope.end({}, sequence);
  if (!options.asyncOp) return nullptr;
  request.outputs = tensors;
  auto work = c10::make_intrusive<TensorWork>(rank_, std::move(request), at::TensorList(), pending_);
  TensorWork::start(work, {}, sequence);
  return work;
}

}  // namespace muster
