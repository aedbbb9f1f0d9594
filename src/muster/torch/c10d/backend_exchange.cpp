// All-to-all, and messages from one rank to another.
#include <ATen/ATen.h>

#include <numeric>
#include <utility>

#include "muster/torch/backend.h"
#include "muster/torch/c10d/arguments.h"
#include "muster/torch/tensor.h"

namespace muster {
namespace {

constexpr const char* kAllToAll = "all_to_all";

/// Elements for each rank, of a tensor that is split along its first dimension: by `splits`, or evenly.
std::vector<size_t> split_counts(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size,
                                 const char* what) {
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : tensor.numel();
  const int64_t row = rows > 0 ? tensor.numel() / rows : 0;
  if (splits.empty()) {
    check_argument(rows % size == 0, kAllToAll, "the ", what, "'s first dimension, ", rows,
                   ", cannot be split evenly among ", size, " ranks");
    return std::vector<size_t>(size, static_cast<size_t>(rows / size * row));
  }
  check_argument(static_cast<int>(splits.size()) == size, kAllToAll, splits.size(), " ", what, " splits for ", size,
                 " ranks");
  std::vector<size_t> counts;
  for (const int64_t split : splits) {
    check_argument(split >= 0, kAllToAll, "an ", what, " split is negative");
    counts.push_back(static_cast<size_t>(split * row));
  }
  check_argument(std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows, kAllToAll, "the ", what,
                 " splits do not add up to its first dimension, ", rows);
  return counts;
}

/// Refuses what Gloo refuses, so that programs run over both.
uint32_t tag_of(int tag, const char* title) {
  check_argument(tag >= 0, title, "Tag must be nonnegative, not ", tag);
  return static_cast<uint32_t>(tag);
}

}  // namespace

ProcessGroupMuster::Handle ProcessGroupMuster::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                             std::vector<int64_t>& output_splits,
                                                             std::vector<int64_t>& input_splits,
                                                             const c10d::AllToAllOptions& options) {
  Request request = this->request(c10d::OpType::ALLTOALL_BASE, "muster:all_to_all_single", options.asyncOp);
  value_or_throw(check_sendable(input));
  value_or_throw(check_sendable(output));
  // As for Gloo: splits are of rows, and which memory these are is not what a reader of strides expects.
  check_argument(input.is_contiguous() && output.is_contiguous(), "all_to_all_single", "tensors must be contiguous");
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
  BufferView to = request.write(output);
  BufferView from = request.apart(request.read(input), to);
  Operation& operation = request.add(Collective::kAllToAll, std::move(from), std::move(to));
  operation.counts = std::move(sent);
  operation.receive_counts = std::move(received);
  if (request.async) request.outputs = {output};
  return launch(std::move(request), input, options.timeout);
}

ProcessGroupMuster::Handle ProcessGroupMuster::alltoall(Tensors& outputs, Tensors& inputs,
                                                        const c10d::AllToAllOptions& options) {
  Request request = this->request(c10d::OpType::ALLTOALL, "muster:all_to_all", options.asyncOp);
  check_argument(!inputs.empty(), kAllToAll, "the input list is empty");
  value_or_throw(check_sendable(inputs.front()));
  check_list(inputs, inputs.front(), size_, kAllToAll, "input");
  check_list(outputs, inputs.front(), size_, kAllToAll, "output");
  BufferView to = request.write(outputs);
  BufferView from = request.apart(request.read(inputs), to);
  Operation& operation = request.add(Collective::kAllToAll, std::move(from), std::move(to));
  // Always with counts: whether all are equal need not be the same at all ranks.
  operation.counts = counts_of(inputs);
  operation.receive_counts = counts_of(outputs);
  if (request.async) request.outputs = outputs;
  return launch(std::move(request), inputs, options.timeout);
}

ProcessGroupMuster::Handle ProcessGroupMuster::send(Tensors& tensors, int destination, int tag) {
  Request request = this->request(c10d::OpType::SEND, "muster:send", /*async=*/true);
  const at::Tensor& tensor = only(tensors, "send");
  const Rank peer = check_rank(destination, size_, "send", "destination");
  request.messages.push_back({request.read(tensor), peer, tag_of(tag, "send"), true});
  return launch(std::move(request), tensors);
}

ProcessGroupMuster::Handle ProcessGroupMuster::launch_receive(Tensors& tensors, int source, int tag,
                                                              c10d::OpType type) {
  const bool any = type == c10d::OpType::RECVANYSOURCE;
  Request request = this->request(type, any ? "muster:recvAnySource" : "muster:recv", /*async=*/true);
  const at::Tensor& tensor = only(tensors, "recv");
  const Rank peer = any ? kAnyRank : check_rank(source, size_, "recv", "source");
  request.messages.push_back({request.write(tensor), peer, tag_of(tag, "recv"), false});
  request.outputs = tensors;
  return launch(std::move(request), tensors);
}

ProcessGroupMuster::Handle ProcessGroupMuster::recv(Tensors& tensors, int source, int tag) {
  return launch_receive(tensors, source, tag, c10d::OpType::RECV);
}

ProcessGroupMuster::Handle ProcessGroupMuster::recvAnysource(Tensors& tensors, int tag) {
  return launch_receive(tensors, kAnyRank, tag, c10d::OpType::RECVANYSOURCE);
}

}  // namespace muster
