#include "muster/torch/nn/data_parallel.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <thread>

#include "torch/models.h"

namespace muster::nn {
namespace {

using test::make_mlp, test::random_tensor;

std::vector<at::Device> cpus(size_t count) { return {count, at::Device(at::kCPU)}; }

TEST(DataParallel, GivesTheOutputsAndGradientsOfOneReplica) {
  for (const int64_t batch : {8, 7, 2, 1}) {
    auto model = make_mlp(1), reference = make_mlp(1);
    const at::Tensor input = random_tensor({batch, 6}, 3).requires_grad_();
    const at::Tensor same = input.detach().clone().requires_grad_();
    const at::Tensor output = data_parallel(model, input, cpus(3));
    const at::Tensor expected = reference->forward(same);
    EXPECT_TRUE(at::allclose(output, expected));
    output.pow(2).sum().backward();
    expected.pow(2).sum().backward();
    EXPECT_TRUE(at::allclose(input.grad(), same.grad()));
    for (size_t i = 0; i < model->parameters().size(); ++i) {
      EXPECT_TRUE(at::allclose(model->parameters()[i].grad(), reference->parameters()[i].grad(), 1e-4, 1e-6)) << i;
    }
  }
}

TEST(DataParallel, SplitsAlongAnyDimension) {
  torch::nn::Linear model(4, 4);
  const at::Tensor input = random_tensor({3, 8, 4}, 1);
  EXPECT_TRUE(at::allclose(data_parallel(model, input, cpus(2), 1), model->forward(input)));
  EXPECT_TRUE(at::allclose(data_parallel(model, input, cpus(2), -2), model->forward(input)));
}

/// Returns a loss, and does not use all of its parameters.
struct LossImpl : torch::nn::Cloneable<LossImpl> {
  LossImpl() { reset(); }
  void reset() override {
    used = register_module("used", torch::nn::Linear(4, 1));
    unused = register_module("unused", torch::nn::Linear(4, 1));
    calls = register_buffer("calls", at::zeros({}));
  }
  at::Tensor forward(const at::Tensor& input) {
    calls.add_(1);
    return used->forward(input).mean();
  }
  torch::nn::Linear used = nullptr, unused = nullptr;
  at::Tensor calls;
};
TORCH_MODULE(Loss);

TEST(DataParallel, StacksScalarsAndKeepsUnusedParameters) {
  Loss model;
  const at::Tensor losses = data_parallel(model, random_tensor({6, 4}, 1), cpus(3));
  EXPECT_EQ(losses.sizes(), at::IntArrayRef({3}));
  losses.mean().backward();
  EXPECT_TRUE(model->used->weight.grad().defined());
  EXPECT_FALSE(model->unused->weight.grad().defined());
  EXPECT_EQ(model->calls.item<float>(), 1) << "the first replica is the module itself";
}

TEST(DataParallel, WithoutGradientsBuildsNoGraph) {
  const torch::NoGradGuard no_gradients;
  auto model = make_mlp(1);
  const at::Tensor input = random_tensor({8, 6}, 1);
  const at::Tensor output = data_parallel(model, input, cpus(2));
  EXPECT_FALSE(output.requires_grad());
  EXPECT_TRUE(at::allclose(output, model->forward(input)));
}

/// Waits in forward, and in backward, until two replicas have arrived.
struct SynchronizedImpl : torch::nn::Cloneable<SynchronizedImpl> {
  explicit SynchronizedImpl(std::shared_ptr<std::atomic<int>> counter) : forwards(std::move(counter)) { reset(); }
  void reset() override { weight = register_parameter("weight", at::ones({1})); }
  static void wait_for_both(std::atomic<int>& counter) {
    for (++counter; counter < 2;) std::this_thread::yield();
  }
  at::Tensor forward(const at::Tensor& input) {
    wait_for_both(*forwards);
    const at::Tensor output = input * weight;
    output.register_hook([backwards = backwards](const at::Tensor&) { wait_for_both(*backwards); });
    return output;
  }
  std::shared_ptr<std::atomic<int>> forwards, backwards = std::make_shared<std::atomic<int>>(0);
  at::Tensor weight;
};

TEST(DataParallel, RunsReplicasAtTheSameTimeForwardAndBackward) {
  const auto model = std::make_shared<SynchronizedImpl>(std::make_shared<std::atomic<int>>(0));
  data_parallel(model, at::ones({2}), cpus(2)).sum().backward();
  EXPECT_EQ(model->weight.grad().item<float>(), 2);
}

struct ThrowingImpl : torch::nn::Cloneable<ThrowingImpl> {
  ThrowingImpl() { reset(); }
  void reset() override { weight = register_parameter("weight", at::ones({1})); }
  at::Tensor forward(const at::Tensor& input) {
    if (input.max().item<float>() > 2) throw std::runtime_error("too much");
    return input * weight;
  }
  at::Tensor weight;
};

TEST(DataParallel, PassesOnExceptionsAndRefusesWrongArguments) {
  const auto model = std::make_shared<ThrowingImpl>();
  EXPECT_THROW(data_parallel(model, at::arange(4.F), cpus(2)), std::runtime_error);
  EXPECT_THROW(data_parallel(model, at::ones({4}), {}), c10::ValueError);
  EXPECT_THROW(data_parallel(model, at::ones({}), cpus(2)), c10::ValueError);
  EXPECT_THROW(data_parallel(model, at::ones({4}), {at::Device(at::kMeta)}), c10::ValueError);
}

}  // namespace
}  // namespace muster::nn
