#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

namespace muster::nn {
namespace detail {

using Forward = std::function<at::Tensor(torch::nn::Module&, const at::Tensor&)>;
at::Tensor data_parallel(const std::shared_ptr<torch::nn::Module>& module, const Forward& forward,
                         const at::Tensor& input, const std::vector<at::Device>& devices, int64_t dim);

}  // namespace detail

/// module->forward(input), with the input cut along `dim` into a part for each of `devices` and a replica of the module
/// at each, run by a thread each; the outputs are joined along `dim` on the first device. A device may be named several
/// times: {2, torch::kCPU} runs two replicas on the CPU. Backward is parallel too (libtorch's own data_parallel, for
/// GPUs, is so for different devices only): gradients are summed, in the order of the devices, in the module's own
/// parameters. No retain_graph, no second derivatives.
///
/// The first replica is the module itself; the others are made by clone() for this call, so the module must derive from
/// torch::nn::Cloneable, and what the others do to their buffers is lost, as in torch. CPU replicas share the
/// parameters' memory. forward takes and returns one tensor; an output without dimensions is stacked. Throws what the
/// first replica that failed threw, after all have ended; c10::ValueError for wrong arguments.
template <class M>
at::Tensor data_parallel(const std::shared_ptr<M>& module, const at::Tensor& input,
                         const std::vector<at::Device>& devices, int64_t dim = 0) {
  const auto forward = [](torch::nn::Module& replica, const at::Tensor& part) -> at::Tensor {
    return dynamic_cast<M&>(replica).forward(part);
  };
  return detail::data_parallel(module, forward, input, devices, dim);
}
template <class M>
at::Tensor data_parallel(const torch::nn::ModuleHolder<M>& module, const at::Tensor& input,
                         const std::vector<at::Device>& devices, int64_t dim = 0) {
  return data_parallel(module.ptr(), input, devices, dim);
}

}  // namespace muster::nn
