#include "muster/torch/collectives.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>

#include "muster/torch/c10d/arguments.h"
#include "muster/torch/c10d/tensor_request.h"
#include "muster/torch/c10d/work.h"
#include "muster/torch/tensor.h"

namespace muster {
namespace {

/// Runs a blocking call: `call` adds tensors to the request and submits their memory to the group.
template <class Call>
void blocking(const char* title, Call call) {
  const at::NoGradGuard no_grad;
  TensorRequest request(c10d::OpType::UNKNOWN, title, /*async=*/false);
  value_or_throw(call(request).wait());
  request.copy_back();
}

/// The shape [size, *like.shape].
at::Tensor slots_like(const at::Tensor& like, int size) {
  value_or_throw(check_sendable(like));
  std::vector<int64_t> shape = like.sizes().vec();
  shape.insert(shape.begin(), size);
  return at::empty(shape, like.options().memory_format(c10::MemoryFormat::Contiguous));
}

void check_slots(const at::Tensor& tensors, int size, const char* title) {
  value_or_throw(check_sendable(tensors));
  check_argument(tensors.dim() > 0 && tensors.size(0) == size, title, "the first dimension of a tensor of shape ",
                 tensors.sizes(), " must be the group's size, ", size);
}

/// Starts a call: `call` adds tensors to the request and submits their memory to the group.
template <class Call>
AsyncWork start_async(Group& group, const char* title, at::Tensor result, CallOptions options, Call call) {
  const at::NoGradGuard no_grad;
  options.async = true;
  auto work = c10::make_intrusive<TensorWork>(group.membership().rank,
                                              TensorRequest(c10d::OpType::UNKNOWN, title, /*async=*/true),
                                              at::TensorList(), std::make_shared<PendingWorks>());
  const muster::Work part = call(work->request(), options);
  TensorWork::start(work, {part}, part.sequence());
  return {std::move(work), std::move(result)};
}

}  // namespace

std::unique_ptr<Store> job_store() { return value_or_throw(Group::job_store()); }

std::shared_ptr<Group> join_job() { return value_or_throw(Group::join_job()); }

void all_reduce(Group& group, at::Tensor tensor, ReduceOp op, const CallOptions& options) {
  blocking("all_reduce", [&](auto& request) { return group.all_reduce(request.in_place(tensor), op, options); });
}

void all_reduce(Group& group, const std::vector<at::Tensor>& tensors, ReduceOp op, const CallOptions& options) {
  for (const auto& list : by_dtype(tensors)) {
    blocking("all_reduce", [&](auto& request) { return group.all_reduce(request.in_place(list), op, options); });
  }
}

void reduce(Group& group, at::Tensor tensor, ReduceOp op, Rank root, const CallOptions& options) {
  const bool here = group.membership().rank == root;
  blocking("reduce", [&](auto& request) {
    return group.reduce(here ? request.in_place(tensor) : request.read(tensor), op, root, options);
  });
}

void broadcast(Group& group, at::Tensor tensor, Rank root, const CallOptions& options) {
  blocking("broadcast", [&](auto& request) { return group.broadcast(request.in_place(tensor), root, options); });
}

void broadcast(Group& group, const std::vector<at::Tensor>& tensors, Rank root, const CallOptions& options) {
  for (const auto& list : by_dtype(tensors)) {
    blocking("broadcast", [&](auto& request) { return group.broadcast(request.in_place(list), root, options); });
  }
}

at::Tensor all_gather(Group& group, const at::Tensor& tensor, const CallOptions& options) {
  at::Tensor output = slots_like(tensor, group.membership().size);
  blocking("all_gather",
           [&](auto& request) { return group.all_gather(request.read(tensor), request.write(output), options); });
  return output;
}

at::Tensor gather(Group& group, const at::Tensor& tensor, Rank root, const CallOptions& options) {
  at::Tensor output;
  if (group.membership().rank == root) output = slots_like(tensor, group.membership().size);
  blocking("gather", [&](auto& request) {
    return group.gather(request.read(tensor), output.defined() ? request.write(output) : BufferView(), root, options);
  });
  return output;
}

void scatter(Group& group, const at::Tensor& tensors, at::Tensor tensor, Rank root, const CallOptions& options) {
  const bool here = group.membership().rank == root;
  if (here) check_slots(tensors, group.membership().size, "scatter");
  blocking("scatter", [&](auto& request) {
    BufferView output = request.write(tensor);
    BufferView input;
    if (here) input = request.copy_if_overlapping(request.read(tensors), output, root * output.bytes());
    return group.scatter(std::move(input), std::move(output), root, options);
  });
}

at::Tensor reduce_scatter(Group& group, const at::Tensor& tensors, ReduceOp op, const CallOptions& options) {
  check_slots(tensors, group.membership().size, "reduce_scatter");
  at::Tensor output = at::empty(tensors.sizes().slice(1), tensors.options());
  blocking("reduce_scatter", [&](auto& request) {
    return group.reduce_scatter(request.read(tensors), request.write(output), op, options);
  });
  return output;
}

at::Tensor all_to_all(Group& group, const at::Tensor& tensors, const CallOptions& options) {
  check_slots(tensors, group.membership().size, "all_to_all");
  at::Tensor output = at::empty(tensors.sizes(), tensors.options());
  blocking("all_to_all",
           [&](auto& request) { return group.all_to_all(request.read(tensors), request.write(output), options); });
  return output;
}

void send(Group& group, const at::Tensor& tensor, Rank dst, uint32_t tag, const CallOptions& options) {
  blocking("send", [&](auto& request) { return group.send(request.read(tensor), dst, tag, options); });
}

Rank recv(Group& group, at::Tensor tensor, Rank src, uint32_t tag, const CallOptions& options) {
  Rank sender = src;
  blocking("recv", [&](auto& request) {
    const muster::Work work = group.receive(request.write(tensor), src, tag, options);
    static_cast<void>(work.wait());
    if (src == kAnyRank) sender = work.source();
    return work;
  });
  return sender;
}

void barrier(Group& group, const CallOptions& options) { value_or_throw(group.barrier(options).wait()); }

at::Tensor AsyncWork::wait(Duration timeout) const {
  // Not ceil(), which overflows for Duration::max(). Zero means the call's own timeout.
  auto whole = std::chrono::duration_cast<std::chrono::milliseconds>(timeout);
  if (timeout > Duration::zero()) whole = std::max(whole, std::chrono::milliseconds(1));
  work_->wait(whole);
  return result_;
}

namespace async {

AsyncWork all_reduce(Group& group, at::Tensor tensor, ReduceOp op, const CallOptions& options) {
  return start_async(group, "all_reduce", tensor, options, [&](TensorRequest& request, const CallOptions& call) {
    return group.all_reduce(request.in_place(tensor), op, call);
  });
}

AsyncWork reduce(Group& group, at::Tensor tensor, ReduceOp op, Rank root, const CallOptions& options) {
  const bool here = group.membership().rank == root;
  return start_async(group, "reduce", tensor, options, [&](TensorRequest& request, const CallOptions& call) {
    return group.reduce(here ? request.in_place(tensor) : request.read(tensor), op, root, call);
  });
}

AsyncWork broadcast(Group& group, at::Tensor tensor, Rank root, const CallOptions& options) {
  return start_async(group, "broadcast", tensor, options, [&](TensorRequest& request, const CallOptions& call) {
    return group.broadcast(request.in_place(tensor), root, call);
  });
}

AsyncWork all_gather(Group& group, const at::Tensor& tensor, const CallOptions& options) {
  const at::Tensor output = slots_like(tensor, group.membership().size);
  return start_async(group, "all_gather", output, options, [&](TensorRequest& request, const CallOptions& call) {
    return group.all_gather(request.read(tensor), request.write(output), call);
  });
}

AsyncWork reduce_scatter(Group& group, const at::Tensor& tensors, ReduceOp op, const CallOptions& options) {
  check_slots(tensors, group.membership().size, "reduce_scatter");
  const at::Tensor output = at::empty(tensors.sizes().slice(1), tensors.options());
  return start_async(group, "reduce_scatter", output, options, [&](TensorRequest& request, const CallOptions& call) {
    return group.reduce_scatter(request.read(tensors), request.write(output), op, call);
  });
}

AsyncWork all_to_all(Group& group, const at::Tensor& tensors, const CallOptions& options) {
  check_slots(tensors, group.membership().size, "all_to_all");
  const at::Tensor output = at::empty(tensors.sizes(), tensors.options());
  return start_async(group, "all_to_all", output, options, [&](TensorRequest& request, const CallOptions& call) {
    return group.all_to_all(request.read(tensors), request.write(output), call);
  });
}

AsyncWork send(Group& group, const at::Tensor& tensor, Rank dst, uint32_t tag, const CallOptions& options) {
  return start_async(group, "send", tensor, options, [&](TensorRequest& request, const CallOptions& call) {
    return group.send(request.read(tensor), dst, tag, call);
  });
}

AsyncWork recv(Group& group, at::Tensor tensor, Rank src, uint32_t tag, const CallOptions& options) {
  return start_async(group, "recv", tensor, options, [&](TensorRequest& request, const CallOptions& call) {
    return group.receive(request.write(tensor), src, tag, call);
  });
}

AsyncWork barrier(Group& group, const CallOptions& options) {
  return start_async(group, "barrier", at::Tensor(), options,
                     [&](TensorRequest&, const CallOptions& call) { return group.barrier(call); });
}

}  // namespace async

}  // namespace muster
