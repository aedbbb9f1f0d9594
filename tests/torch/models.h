#pragma once

#include <gtest/gtest.h>
#include <torch/nn.h>

#include <memory>
#include <vector>

#include "muster/torch/collectives.h"

namespace muster::test {

/// A multilayer perceptron. The same seed gives the same parameters in every process.
inline torch::nn::Sequential make_mlp(uint64_t seed, int64_t inputs = 6, int64_t outputs = 3) {
  namespace nn = torch::nn;
  nn::Sequential model(nn::Linear(inputs, 16), nn::Tanh(), nn::Linear(16, 16), nn::Tanh(), nn::Linear(16, outputs));
  const auto generator = at::detail::createCPUGenerator(seed);
  const torch::NoGradGuard no_gradients;
  for (auto& parameter : model->parameters()) parameter.normal_(0, 0.3, generator);
  return model;
}

inline at::Tensor random_tensor(at::IntArrayRef shape, uint64_t seed) {
  return at::randn(shape, at::detail::createCPUGenerator(seed));
}

/// The test's group as a shared_ptr that does not own it.
inline std::shared_ptr<Group> borrowed(Group& group) {
  return {&group, [](Group*) {}};
}

inline void expect_close(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::allclose(a[i], b[i], 1e-4, 1e-6)) << "tensor " << i;
}

/// Expects the same bits at all ranks.
inline void expect_alike(Group& group, const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor all = all_gather(group, tensor.detach());
    for (int64_t rank = 1; rank < all.size(0); ++rank) EXPECT_TRUE(at::equal(all[0], all[rank]));
  }
}

}  // namespace muster::test
