#include "muster/torch/nn/functional.h"

#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <vector>

#include "group/ranks.h"
#include "torch/models.h"

namespace muster::nn {
namespace {

constexpr int kRanks = 3;

using Distributed = std::function<at::Tensor(const std::shared_ptr<Group>& group, const at::Tensor& input)>;
/// The output of a rank, computed in one process from the inputs of all ranks.
using Reference = std::function<at::Tensor(const std::vector<at::Tensor>& inputs, int64_t rank)>;

at::Tensor gradient(const at::Tensor& output, const at::Tensor& input) {
  const at::Tensor result = torch::autograd::grad({output}, {input}, {}, /*retain_graph=*/true,
                                                  /*create_graph=*/true, /*allow_unused=*/true)[0];
  return result.defined() ? result : at::zeros_like(input);
}

/// Differs between ranks. The gradient of its gradient is not zero.
at::Tensor loss_of(const at::Tensor& output, int64_t rank) {
  return output.pow(3).sum() * static_cast<double>(rank + 1);
}

/// Compares outputs, gradients and gradients of gradients with those of one process.
void check_gradients(const Distributed& distributed, const Reference& reference) {
  test::run_group(kRanks, "shm", [&](Group& group) {
    const auto rank = static_cast<size_t>(group.membership().rank);
    std::vector<at::Tensor> inputs;
    for (int r = 0; r < kRanks; ++r) {
      inputs.push_back(test::random_tensor({kRanks, 4}, static_cast<uint64_t>(r)).to(at::kDouble).requires_grad_());
    }
    at::Tensor expected_loss = at::zeros({}, at::kDouble), expected_square = at::zeros({}, at::kDouble);
    for (int64_t r = 0; r < kRanks; ++r) expected_loss = expected_loss + loss_of(reference(inputs, r), r);
    for (const at::Tensor& input : inputs) {
      expected_square = expected_square + gradient(expected_loss, input).pow(2).sum();
    }

    const at::Tensor input = inputs[rank].detach().clone().requires_grad_();
    const at::Tensor output = distributed(test::borrowed(group), input);
    EXPECT_TRUE(at::allclose(output, reference(inputs, static_cast<int64_t>(rank))));
    const at::Tensor first = gradient(loss_of(output, static_cast<int64_t>(rank)), input);
    EXPECT_TRUE(at::allclose(first, gradient(expected_loss, inputs[rank]))) << first;
    const at::Tensor second = gradient(first.pow(2).sum(), input);
    EXPECT_TRUE(at::allclose(second, gradient(expected_square, inputs[rank]))) << second;
  });
}

at::Tensor combined(const std::vector<at::Tensor>& inputs, ReduceOp op) {
  const at::Tensor all = at::stack(inputs);
  return op == ReduceOp::kSum ? all.sum(0) : all.mean(0);
}

TEST(FunctionalCollectives, AllReduceHasItsGradient) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
    check_gradients(
        [op](const auto& group, const at::Tensor& input) { return functional::all_reduce(group, input, op); },
        [op](const auto& inputs, int64_t) { return combined(inputs, op); });
  }
}

TEST(FunctionalCollectives, ReduceAndBroadcastHaveTheirGradients) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
    check_gradients(
        [op](const auto& group, const at::Tensor& input) { return functional::reduce(group, input, op, 1); },
        [op](const auto& inputs, int64_t rank) {
          return rank == 1 ? combined(inputs, op) : at::zeros_like(inputs[0]);
        });
  }
  check_gradients([](const auto& group, const at::Tensor& input) { return functional::broadcast(group, input, 2); },
                  [](const auto& inputs, int64_t) { return inputs[2]; });
}

TEST(FunctionalCollectives, GatherAndScatterHaveTheirGradients) {
  check_gradients([](const auto& group, const at::Tensor& input) { return functional::all_gather(group, input); },
                  [](const auto& inputs, int64_t) { return at::stack(inputs); });
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
    check_gradients(
        [op](const auto& group, const at::Tensor& input) { return functional::reduce_scatter(group, input, op); },
        [op](const auto& inputs, int64_t rank) { return combined(inputs, op)[rank]; });
  }
  check_gradients([](const auto& group, const at::Tensor& input) { return functional::all_to_all(group, input); },
                  [](const auto& inputs, int64_t rank) {
                    std::vector<at::Tensor> slots;
                    for (const at::Tensor& input : inputs) slots.push_back(input[rank]);
                    return at::stack(slots);
                  });
}

TEST(FunctionalCollectives, KeepTheirInputAndRefuseOtherOperations) {
  test::run_group(2, "shm", [](Group& group) {
    const auto shared = test::borrowed(group);
    const at::Tensor ones = at::ones({2, 2});
    EXPECT_EQ(functional::all_reduce(shared, ones).sum().item<float>(), 8);
    EXPECT_EQ(ones.sum().item<float>(), 4);
    EXPECT_THROW(functional::all_reduce(shared, ones, ReduceOp::kMax), c10::ValueError);
  });
}

}  // namespace
}  // namespace muster::nn
