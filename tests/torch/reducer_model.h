#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "muster/torch/collectives.h"
#include "muster/torch/exception.h"
#include "muster/torch/reducer/reducer.h"
#include "torch/torch_ranks.h"

namespace muster::test {

/// Two layers, and a third one that only some inputs use.
struct Model {
  explicit Model(at::ScalarType dtype = at::kFloat) {
    const auto parameter = [&](at::IntArrayRef shape, int64_t start) {
      int64_t size = 1;
      for (const int64_t s : shape) size *= s;
      const at::Tensor values = at::sin(at::arange(start, start + size, at::kFloat)).view(shape).to(dtype);
      return values.detach().requires_grad_(true);
    };
    parameters = {parameter({8, 16}, 0), parameter({16}, 100), parameter({16, 4}, 200), parameter({16, 4}, 300)};
  }
  at::Tensor forward(const at::Tensor& input, bool with_extra = true) const {
    const at::Tensor hidden = at::tanh(at::matmul(input, parameters[0]) + parameters[1]);
    const at::Tensor output = at::matmul(hidden, parameters[2]);
    return with_extra ? output + at::matmul(hidden, parameters[3]).mul(0.5) : output;
  }
  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> all;
    for (const at::Tensor& parameter : parameters) all.push_back(parameter.grad());
    return all;
  }
  void zero_grad() const {
    for (const at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
  }
  std::vector<at::Tensor> parameters;
};

inline at::Tensor input_of(int64_t rank, int64_t iteration = 0, at::ScalarType dtype = at::kFloat) {
  return at::cos(at::arange(40, at::kFloat) + static_cast<double>(40 * rank + 1000 * iteration)).view({5, 8}).to(dtype);
}

/// The gradients that one process computes from the inputs of all ranks.
inline std::vector<at::Tensor> expected_gradients(int size, int iterations = 1, at::ScalarType dtype = at::kFloat) {
  const Model model(dtype);
  for (int iteration = 0; iteration < iterations; ++iteration) {
    std::vector<at::Tensor> inputs;
    for (int rank = 0; rank < size; ++rank) inputs.push_back(input_of(rank, iteration, dtype));
    at::real(model.forward(at::cat(inputs)).pow(2)).mean().backward();
  }
  return model.gradients();
}

inline void backward(Reducer& reducer, const Model& model, const at::Tensor& input, bool with_extra = true) {
  reducer.prepare_for_forward();
  reducer.rebuild_buckets();
  const at::Tensor output = model.forward(input, with_extra);
  reducer.prepare_for_backward({output});
  at::real(output.pow(2)).mean().backward();
}

inline void expect_close(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& expected,
                         const std::string& what = "") {
  ASSERT_EQ(gradients.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(gradients[i].defined()) << what << ", parameter " << i;
    EXPECT_TRUE(at::allclose(gradients[i], expected[i], 1e-4, 1e-5)) << what << ", parameter " << i;
  }
}

inline void expect_same_bits(Group& group, const std::vector<at::Tensor>& gradients) {
  for (const at::Tensor& gradient : gradients) {
    const at::Tensor all = all_gather(group, gradient);
    for (int64_t rank = 1; rank < all.size(0); ++rank) EXPECT_TRUE(at::equal(all[rank], all[0]));
  }
}

/// Runs ranks as threads, each with its group as a shared_ptr that does not own it.
inline void run(int size, const std::function<void(const std::shared_ptr<Group>&)>& body) {
  run_group(size, "shm", [&](Group& group) { body(std::shared_ptr<Group>(&group, [](Group*) {})); });
}

/// The same over `links`: "shm", "tcp", or "hosts". "hosts" puts the odd ranks on another host, so it uses both.
inline void run_over(const std::string& links, int size,
                     const std::function<void(const std::shared_ptr<Group>&)>& body) {
  const auto options = [&](Rank rank) {
    const bool hosts = links == "hosts";
    GroupOptions options = options_for(hosts ? "shm,unix,tcp" : links);
    if (hosts) options.host_label = rank % 2 == 0 ? "even" : "odd";
    return options;
  };
  run_group(size, options, [&](Group& group) { body(std::shared_ptr<Group>(&group, [](Group*) {})); });
}

constexpr const char* kLinks[] = {"shm", "tcp", "hosts"};

inline void run_everywhere(int size, const std::function<void(const std::shared_ptr<Group>&)>& body) {
  for (const char* links : kLinks) {
    SCOPED_TRACE(links);
    run_over(links, size, body);
  }
}

inline ReducerOptions small_buckets() {
  ReducerOptions options;
  options.names = {"first.weight", "first.bias", "second.weight", "extra.weight"};
  options.first_bucket_bytes = options.bucket_bytes = 300;
  return options;
}

inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace muster::test
