#include <ATen/ATen.h>

#include <numeric>
#include <utility>

#include "muster/torch/backend.h"
#include "muster/torch/c10d/arguments.h"
#include "muster/torch/tensor.h"

namespace muster {
namespace {

/// An all-gather of one input into a list of tensors, which may have different lengths.
void add_list_gather(TensorRequest& request, const std::vector<at::Tensor>& slots, const at::Tensor& tensor, int rank,
                     int size) {
  constexpr const char* kTitle = "all_gather";
  value_or_throw(check_dense(tensor));
  check_list(slots, tensor, size, kTitle, "output");
  check_argument(slots[rank].numel() == tensor.numel(), kTitle, "output ", rank, " has ", slots[rank].numel(),
                 " elements, but this rank's input has ", tensor.numel());
  std::vector<size_t> counts = counts_of(slots);
  const size_t own = std::accumulate(counts.begin(), counts.begin() + rank, size_t{0}) * tensor.element_size();
  if (all_equal(counts)) counts.clear();
  request.add_disjoint(Collective::kAllGather, request.read(tensor), request.write(slots), own).counts =
      std::move(counts);
}

/// Requires the root's list to have one tensor for each rank, each as long as `tensor`, and returns it.
const std::vector<at::Tensor>& check_root_list(const std::vector<std::vector<at::Tensor>>& lists,
                                               const at::Tensor& tensor, int size, const char* title,
                                               const char* listed, const char* other) {
  const std::vector<at::Tensor>& list = single_list(lists, title);
  check_list(list, tensor, size, title, listed);
  for (const at::Tensor& each : list) {
    check_argument(each.numel() == tensor.numel(), title, "an ", listed, " has ", each.numel(), " elements, but the ",
                   other, " has ", tensor.numel(), "; muster.Group has a ", title, " for blocks that differ");
  }
  return list;
}

std::vector<at::Tensor> flatten(const std::vector<std::vector<at::Tensor>>& lists) {
  std::vector<at::Tensor> all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

/// An all-gather of several inputs at each rank, with one output list for each input. Every list gets the inputs of all
/// ranks: the first list from the group, the others as copies.
void add_gather_of_several(TensorRequest& request, const std::vector<std::vector<at::Tensor>>& outputs,
                           const std::vector<at::Tensor>& inputs, int size) {
  constexpr const char* kTitle = "all_gather";
  check_alike(inputs, kTitle);
  check_argument(outputs.size() == inputs.size(), kTitle, "there are ", inputs.size(), " inputs, but ", outputs.size(),
                 " output lists");
  std::vector<at::Tensor> shapes = flatten(outputs);
  check_argument(shapes.size() == inputs.size() * outputs.size() * static_cast<size_t>(size), kTitle,
                 "each output list needs ", inputs.size() * static_cast<size_t>(size), " tensors");
  shapes.push_back(inputs.front());
  check_alike(shapes, kTitle);
  const std::vector<at::Tensor>& first = outputs.front();
  request.add_disjoint(Collective::kAllGather, request.read(inputs), request.write(first));
  for (size_t list = 1; list < outputs.size(); ++list) {
    for (size_t i = 0; i < first.size(); ++i) request.copy_at_end(outputs[list][i], first[i]);
  }
}

}  // namespace

ProcessGroupMuster::Handle ProcessGroupMuster::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  TensorRequest request = this->request(OpType::BROADCAST, "muster:broadcast", options.asyncOp, tensors);
  if (tensors.size() != 1) check_alike(tensors, "broadcast");
  const Rank root = check_rank(options.rootRank, size_, "broadcast");
  check_argument(options.rootTensor >= 0 && options.rootTensor < static_cast<int64_t>(tensors.size()), "broadcast",
                 "rootTensor is ", options.rootTensor, ", but there are ", tensors.size(), " tensors");
  const at::Tensor& tensor = tensors[static_cast<size_t>(options.rootTensor)];
  BufferView data = rank_ == root ? request.read(tensor) : request.write(tensor);
  request.add(Collective::kBroadcast, data, data).call.root = root;
  for (const at::Tensor& other : tensors) {
    if (!other.is_same(tensor)) request.copy_at_end(other, tensor);
  }
  return launch(std::move(request), tensors, options.timeout);
}

ProcessGroupMuster::Handle ProcessGroupMuster::allgather(TensorLists& outputs, Tensors& inputs,
                                                         const c10d::AllgatherOptions& options) {
  TensorRequest request = this->request(OpType::ALLGATHER, "muster:all_gather", options.asyncOp);
  if (inputs.size() > 1) {
    add_gather_of_several(request, outputs, inputs, size_);
  } else {
    add_list_gather(request, single_list(outputs, "all_gather"), single_tensor(inputs, "all_gather"), rank_, size_);
  }
  if (request.async) request.outputs = outputs.size() == 1 ? outputs.front() : flatten(outputs);
  return launch(std::move(request), inputs, options.timeout);
}

ProcessGroupMuster::Handle ProcessGroupMuster::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                                   const c10d::AllgatherOptions& options) {
  TensorRequest request = this->request(OpType::ALLGATHER_COALESCED, "muster:all_gather", options.asyncOp);
  constexpr const char* kTitle = "all_gather_coalesced";
  check_argument(static_cast<int>(outputs.size()) == size_, kTitle, "takes one output list for each rank, ", size_,
                 ", not ", outputs.size());
  std::vector<Tensors> slots(inputs.size());
  for (const Tensors& list : outputs) {
    check_argument(list.size() == inputs.size(), kTitle, "an output list and the input list have different lengths");
    for (size_t i = 0; i < list.size(); ++i) {
      // Every rank checks all tensors, so that all ranks fail together and none waits for the others.
      check_argument(list[i].sizes() == inputs[i].sizes(), kTitle, "invalid size of output tensor at index ", i,
                     " (expected ", inputs[i].sizes(), ", got ", list[i].sizes(), ")");
      slots[i].push_back(list[i]);
    }
  }
  for (size_t i = 0; i < inputs.size(); ++i) add_list_gather(request, slots[i], inputs[i], rank_, size_);
  request.outputs = flatten(outputs);
  return launch(std::move(request), inputs, options.timeout);
}

ProcessGroupMuster::Handle ProcessGroupMuster::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                               const c10d::AllgatherOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

ProcessGroupMuster::Handle ProcessGroupMuster::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                               const c10d::AllgatherOptions& options) {
  constexpr const char* kTitle = "all_gather_into_tensor";
  TensorRequest request =
      this->request(OpType::_ALLGATHER_BASE, "muster:all_gather_into_tensor", options.asyncOp, outputs);
  check_argument(outputs.size() == inputs.size(), kTitle, "outputs and inputs must have the same number of tensors");
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_divisible(outputs[i], inputs[i], size_, kTitle);
    BufferView input = request.read(inputs[i]);
    const size_t own = rank_ * input.bytes();
    request.add_disjoint(Collective::kAllGather, std::move(input), request.write(outputs[i]), own);
  }
  return launch(std::move(request), inputs, options.timeout);
}

ProcessGroupMuster::Handle ProcessGroupMuster::gather(TensorLists& outputs, Tensors& inputs,
                                                      const c10d::GatherOptions& options) {
  TensorRequest request = this->request(OpType::GATHER, "muster:gather", options.asyncOp);
  const at::Tensor& tensor = single_tensor(inputs, "gather");
  const Rank root = check_rank(options.rootRank, size_, "gather");
  BufferView input = request.read(tensor);
  const size_t own = rank_ * input.bytes();
  BufferView output;
  if (rank_ == root) {
    const Tensors& slots = check_root_list(outputs, tensor, size_, "gather", "output", "input");
    output = request.write(slots);
    if (request.async) request.outputs = slots;
  } else {
    check_argument(flatten(outputs).empty(), "gather", "only the root, rank ", root, ", has outputs");
  }
  request.add_disjoint(Collective::kGather, std::move(input), std::move(output), own).call.root = root;
  return launch(std::move(request), inputs, options.timeout);
}

#if MUSTER_TORCH_HAS_SINGLE
ProcessGroupMuster::Handle ProcessGroupMuster::gather_single(at::Tensor& output, at::Tensor& input,
                                                             const c10d::GatherOptions& options) {
  TensorLists outputs;
  if (rank_ == options.rootRank) {
    check_divisible(output, input, size_, "gather_single");
    check_argument(output.is_contiguous(), "gather_single", "the output must be contiguous");
    outputs.push_back(output.view({size_, input.numel()}).unbind());
  }
  Tensors inputs{input};
  return gather(outputs, inputs, options);
}
#endif

ProcessGroupMuster::Handle ProcessGroupMuster::scatter(Tensors& outputs, TensorLists& inputs,
                                                       const c10d::ScatterOptions& options) {
  TensorRequest request = this->request(OpType::SCATTER, "muster:scatter", options.asyncOp, outputs);
  const at::Tensor& tensor = single_tensor(outputs, "scatter");
  const Rank root = check_rank(options.rootRank, size_, "scatter");
  BufferView output = request.write(tensor);
  const size_t own = rank_ * output.bytes();
  BufferView input;
  if (rank_ == root) {
    input = request.read(check_root_list(inputs, tensor, size_, "scatter", "input", "output"));
  } else {
    check_argument(flatten(inputs).empty(), "scatter", "only the root, rank ", root, ", has inputs");
  }
  request.add_disjoint(Collective::kScatter, std::move(input), std::move(output), own).call.root = root;
  return launch(std::move(request), outputs, options.timeout);
}

}  // namespace muster
