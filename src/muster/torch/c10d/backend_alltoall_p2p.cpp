// All-to-all and point-to-point messages.
#include <ATen/ATen.h>

#include <numeric>
#include <utility>

#include "muster/torch/backend.h"
#include "muster/torch/c10d/arguments.h"
#include "muster/torch/tensor.h"

namespace muster {
namespace {

constexpr const char* kAllToAll = "all_to_all";

/// The number of elements for each rank when the first dimension is split by `splits`, or evenly if there are none.
std::vector<size_t> split_counts(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size,
                                 const char* role) {
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : tensor.numel();
  const int64_t row = rows > 0 ? tensor.numel() / rows : 0;
  if (splits.empty()) {
    check_argument(rows % size == 0, kAllToAll, "the ", role, "'s first dimension, ", rows,
                   ", cannot be split evenly among ", size, " ranks");
    return std::vector<size_t>(size, static_cast<size_t>(rows / size * row));
  }
  check_argument(static_cast<int>(splits.size()) == size, kAllToAll, splits.size(), " ", role, " splits for ", size,
                 " ranks");
  std::vector<size_t> counts;
  for (const int64_t split : splits) {
    check_argument(split >= 0, kAllToAll, "an ", role, " split is negative");
    counts.push_back(static_cast<size_t>(split * row));
  }
  check_argument(std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows, kAllToAll, "the ", role,
                 " splits do not add up to its first dimension, ", rows);
  return counts;
}

/// Rejects negative tags as Gloo does, so that programs run over both backends.
uint32_t tag_of(int tag, const char* title) {
  check_argument(tag >= 0, title, "Tag must be nonnegative, got ", tag);
  return static_cast<uint32_t>(tag);
}

}  // namespace

ProcessGroupMuster::Handle ProcessGroupMuster::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                             std::vector<int64_t>& output_splits,
                                                             std::vector<int64_t>& input_splits,
                                                             const c10d::AllToAllOptions& options) {
  TensorRequest request = this->request(OpType::ALLTOALL_BASE, "muster:all_to_all_single", options.asyncOp, output);
  value_or_throw(check_dense(input));
  value_or_throw(check_dense(output));
  // Gloo has the same rule. Splits count rows, and in a contiguous tensor a row is one block of memory.
  check_argument(input.is_contiguous() && output.is_contiguous(), "all_to_all_single", "Tensors must be contiguous");
  check_argument(output.scalar_type() == input.scalar_type(), kAllToAll,
                 "input and output differ in dtype: ", input.scalar_type(), " and ", output.scalar_type());
  std::vector<size_t> sent = split_counts(input, input_splits, size_, "input");
  std::vector<size_t> received = split_counts(output, output_splits, size_, "output");
  if (input_splits.empty() && output_splits.empty()) {
    check_argument(input.numel() == output.numel(), kAllToAll, "the input has ", input.numel(),
                   " elements, the output ", output.numel());
    sent.clear();
    received.clear();
  }
  Operation& operation = request.add_disjoint(Collective::kAllToAll, request.read(input), request.write(output));
  operation.counts = std::move(sent);
  operation.receive_counts = std::move(received);
  return launch(std::move(request), input, options.timeout);
}

ProcessGroupMuster::Handle ProcessGroupMuster::alltoall(Tensors& outputs, Tensors& inputs,
                                                        const c10d::AllToAllOptions& options) {
  TensorRequest request = this->request(OpType::ALLTOALL, "muster:all_to_all", options.asyncOp, outputs);
  check_argument(!inputs.empty(), kAllToAll, "the input list is empty");
  value_or_throw(check_dense(inputs.front()));
  check_list(inputs, inputs.front(), size_, kAllToAll, "input");
  check_list(outputs, inputs.front(), size_, kAllToAll, "output");
  Operation& operation = request.add_disjoint(Collective::kAllToAll, request.read(inputs), request.write(outputs));
  // Passes counts even if they are equal here, because they may differ at another rank.
  operation.counts = counts_of(inputs);
  operation.receive_counts = counts_of(outputs);
  return launch(std::move(request), inputs, options.timeout);
}

ProcessGroupMuster::Handle ProcessGroupMuster::send(Tensors& tensors, int dst, int tag) {
  TensorRequest request = this->request(OpType::SEND, "muster:send", /*async=*/true);
  const at::Tensor& tensor = single_tensor(tensors, "send");
  const Rank peer = check_rank(dst, size_, "send", "destination");
  request.device_groups = device_group_for_messages();
  request.messages.push_back({request.read(tensor), peer, tag_of(tag, "send"), true});
  return launch(std::move(request), tensors);
}

ProcessGroupMuster::Handle ProcessGroupMuster::launch_recv(Tensors& tensors, int src, int tag, OpType type) {
  const bool any = type == OpType::RECVANYSOURCE;
  TensorRequest request = this->request(type, any ? "muster:recvAnySource" : "muster:recv", /*async=*/true, tensors);
  const at::Tensor& tensor = single_tensor(tensors, "recv");
  const Rank peer = any ? kAnyRank : check_rank(src, size_, "recv", "source");
  request.device_groups = any ? nullptr : device_group_for_messages();
  request.messages.push_back({request.write(tensor), peer, tag_of(tag, "recv"), false});
  return launch(std::move(request), tensors);
}

ProcessGroupMuster::Handle ProcessGroupMuster::recv(Tensors& tensors, int src, int tag) {
  return launch_recv(tensors, src, tag, OpType::RECV);
}

ProcessGroupMuster::Handle ProcessGroupMuster::recvAnysource(Tensors& tensors, int tag) {
  return launch_recv(tensors, kAnyRank, tag, OpType::RECVANYSOURCE);
}

}  // namespace muster
