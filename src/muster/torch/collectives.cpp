#include "muster/torch/collectives.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "muster/torch/tensor.h"

namespace muster {
namespace {

/// `tensor` itself where the core can read it, else a copy that it can.
at::Tensor plain(const at::Tensor& tensor) {
  return is_plain(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous();
}

/// Runs `call` on the tensor's memory, or on a copy that is copied back.
template <class Call>
void in_place(at::Tensor& tensor, Call call) {
  const at::NoGradGuard no_grad;
  at::Tensor dense = plain(tensor);
  value_or_throw(call(value_or_throw(view_of(dense))).wait());
  if (!dense.is_same(tensor)) tensor.copy_(dense);
}

}  // namespace

void all_reduce(Group& group, at::Tensor tensor, ReduceOp op, const CallOptions& options) {
  in_place(tensor, [&](BufferView view) { return group.all_reduce(view, op, options); });
}

void all_reduce(Group& group, const std::vector<at::Tensor>& tensors, ReduceOp op, const CallOptions& options) {
  if (tensors.empty()) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> flat;
  flat.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    if (tensor.scalar_type() != tensors.front().scalar_type()) {
      throw_error({ErrorCode::kInvalidArgument, "the tensors of one all_reduce must be of one dtype"});
    }
    flat.push_back(tensor.reshape(-1));
  }
  at::Tensor joined = at::cat(flat);
  all_reduce(group, joined, op, options);
  int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    tensor.copy_(joined.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
}

void broadcast(Group& group, at::Tensor tensor, Rank root, const CallOptions& options) {
  in_place(tensor, [&](BufferView view) { return group.broadcast(view, root, options); });
}

at::Tensor all_gather(Group& group, const at::Tensor& tensor, const CallOptions& options) {
  const at::NoGradGuard no_grad;
  const at::Tensor input = plain(tensor);
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape.insert(shape.begin(), group.membership().size);
  at::Tensor output = at::empty(shape, tensor.options().memory_format(c10::MemoryFormat::Contiguous));
  value_or_throw(group.all_gather(value_or_throw(view_of(input)), value_or_throw(view_of(output)), options).wait());
  return output;
}

void barrier(Group& group, const CallOptions& options) { value_or_throw(group.barrier(options).wait()); }

}  // namespace muster
