#pragma once

#include <torch/nn.h>

#include <memory>

namespace muster::test {

/// A multilayer perceptron that is the same wherever it is made with the same seed.
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

}  // namespace muster::test
