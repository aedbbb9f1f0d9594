#pragma once

#include <functional>
#include <memory>
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

/// Computes module->forward(input) in parallel. The input is split along `dim`, a replica of the module at each of
/// `devices` computes one part in a thread of its own, and the outputs are concatenated along `dim` on the first
/// device. A device may be given several times: {2, torch::kCPU} runs two replicas on the CPU. Backward is parallel
/// too; in libtorch's own data_parallel it is parallel only across different devices. Gradients are summed in the order
/// of the devices, in the module's own parameters. retain_graph and second derivatives are not supported.
///
/// The first replica is the module itself. clone() makes the others for this call, so the module must derive from
/// torch::nn::Cloneable, and changes of their buffers are lost, as in torch. CPU replicas share the parameters' memory.
/// forward takes and returns one tensor; outputs without dimensions are stacked. When all replicas have ended, throws
/// the exception of the first one that failed. Throws c10::ValueError for wrong arguments.
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
