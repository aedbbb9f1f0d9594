#include "muster/torch/nn/data_parallel.h"

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <exception>
#include <set>
#include <thread>

#include "muster/torch/c10d/arguments.h"

namespace muster::nn {
namespace {

/// Runs body(i) for each i < count: body(0) on this thread, each other call on a thread of its own with the modes of
/// this thread (gradients, autocast). Rethrows the first failure when all calls have ended.
void run_in_threads(size_t count, const std::function<void(size_t)>& body) {
  std::vector<std::exception_ptr> failures(count);
  const auto guarded = [&](size_t i) {
    try {
      body(i);
    } catch (...) {
      failures[i] = std::current_exception();
    }
  };
  const at::ThreadLocalState modes;
  std::vector<std::thread> threads;
  for (size_t i = 1; i < count; ++i) {
    threads.emplace_back([&, i] {
      const at::ThreadLocalStateGuard guard(modes);
      guarded(i);
    });
  }
  guarded(0);
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

/// The parameters that require gradients. A parameter that modules share is listed once.
std::vector<at::Tensor> trained_parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> parameters;
  std::set<const void*> seen;
  for (const at::Tensor& parameter : module.parameters()) {
    if (parameter.requires_grad() && seen.insert(parameter.unsafeGetTensorImpl()).second) {
      parameters.push_back(parameter);
    }
  }
  return parameters;
}

/// The state of one data_parallel() call. Each replica has an autograd graph of its own, detached at its input and
/// parameters, so that threads can traverse the graphs at the same time.
struct Replicas : torch::CustomClassHolder {
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  std::vector<std::vector<at::Tensor>> parameters;
  std::vector<at::Tensor> inputs, outputs;
  int64_t dim = 0;

  size_t size() const { return modules.size(); }

  at::Tensor run(const detail::Forward& forward) {
    outputs.resize(size());
    run_in_threads(size(), [&](size_t i) { outputs[i] = forward(*modules[i], inputs[i]); });
    std::vector<at::Tensor> joined;
    for (const at::Tensor& output : outputs) {
      joined.push_back((output.dim() == 0 ? output.unsqueeze(0) : output).to(outputs.front().device()));
    }
    return at::cat(joined, outputs.front().dim() == 0 ? 0 : dim);
  }

  /// Splits the gradient of the concatenated output into that of each replica's output.
  std::vector<at::Tensor> split(const at::Tensor& gradient) const {
    std::vector<at::Tensor> parts;
    int64_t begin = 0;
    for (const at::Tensor& output : outputs) {
      const bool scalar = output.dim() == 0;
      const int64_t length = scalar ? 1 : output.size(dim);
      const at::Tensor part = gradient.narrow(scalar ? 0 : dim, begin, length);
      parts.push_back((scalar ? part.squeeze(0) : part).to(output.device()));
      begin += length;
    }
    return parts;
  }
};

struct DataParallelFunction : torch::autograd::Function<DataParallelFunction> {
  // Backward returns gradients for the arguments that are tensors: the input and the module's parameters.
  static at::Tensor forward(torch::autograd::AutogradContext* context, const c10::intrusive_ptr<Replicas>& replicas,
                            const detail::Forward* run, const at::Tensor& input, at::TensorList) {
    context->saved_data["replicas"] = c10::IValue::make_capsule(replicas);
    context->saved_data["input"] = c10::IValue(input.requires_grad());
    const at::AutoGradMode with_gradients(true);
    return replicas->run(*run).detach();
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto replicas = c10::static_intrusive_pointer_cast<Replicas>(context->saved_data["replicas"].toCapsule());
    const bool to_input = context->saved_data["input"].toBool();
    const std::vector<at::Tensor> parts = replicas->split(gradients.front());
    std::vector<torch::autograd::variable_list> found(replicas->size());
    run_in_threads(replicas->size(), [&](size_t i) {
      std::vector<at::Tensor> sources = replicas->parameters[i];
      if (to_input) sources.push_back(replicas->inputs[i]);
      if (!replicas->outputs[i].requires_grad() || sources.empty()) return;
      found[i] = torch::autograd::grad({replicas->outputs[i]}, sources, {parts[i]}, /*retain_graph=*/false,
                                       /*create_graph=*/false, /*allow_unused=*/true);
    });
    return sum(*replicas, found, to_input);
  }

 private:
  /// One gradient for each argument of forward: none for the first two, then those of the input and of the parameters.
  static torch::autograd::variable_list sum(const Replicas& replicas,
                                            std::vector<torch::autograd::variable_list>& found, bool to_input) {
    const size_t count = replicas.parameters.front().size();
    torch::autograd::variable_list results(3 + count);
    std::vector<at::Tensor> inputs;
    for (size_t i = 0; i < found.size(); ++i) {
      if (to_input) {
        const bool used = !found[i].empty() && found[i].back().defined();
        inputs.push_back((used ? found[i].back() : at::zeros_like(replicas.inputs[i])));
      }
      for (size_t p = 0; p < count && !found[i].empty(); ++p) {
        if (!found[i][p].defined()) continue;
        const at::Tensor here = found[i][p].to(replicas.parameters.front()[p].device());
        results[3 + p] = results[3 + p].defined() ? results[3 + p] + here : here;
      }
    }
    if (to_input) {
      for (at::Tensor& part : inputs) part = part.to(inputs.front().device());
      results[2] = at::cat(inputs, replicas.dim);
    }
    return results;
  }
};

/// A copy of the module on `device`, which shares the parameters' memory if that is the module's device.
std::shared_ptr<torch::nn::Module> replica_of(const torch::nn::Module& module, at::Device device) {
  auto replica = module.clone(device);
  const auto originals = module.named_parameters();
  for (auto& parameter : replica->named_parameters()) {
    const at::Tensor& original = originals[parameter.key()];
    parameter.value().set_requires_grad(original.requires_grad());
    if (original.device() == device) parameter.value().set_data(original.detach());
  }
  return replica;
}

c10::intrusive_ptr<Replicas> replicate(const std::shared_ptr<torch::nn::Module>& module,
                                       const std::vector<at::Device>& devices, const std::vector<at::Tensor>& parts,
                                       bool to_input) {
  auto replicas = c10::make_intrusive<Replicas>();
  for (size_t i = 0; i < parts.size(); ++i) {
    replicas->modules.push_back(i == 0 ? module : replica_of(*module, devices[i]));
    replicas->parameters.push_back(trained_parameters(*replicas->modules.back()));
    replicas->inputs.push_back(parts[i].detach().to(devices[i]).requires_grad_(to_input));
  }
  return replicas;
}

}  // namespace

at::Tensor detail::data_parallel(const std::shared_ptr<torch::nn::Module>& module, const Forward& forward,
                                 const at::Tensor& input, const std::vector<at::Device>& devices, int64_t dim) {
  check_argument(!devices.empty(), "data_parallel", "the list of devices is empty");
  check_argument(input.dim() > 0, "data_parallel", "an input without dimensions cannot be split");
  for (const auto& parameter : module->named_parameters()) {
    check_argument(parameter.value().device() == devices.front(), "data_parallel", "the parameter ", parameter.key(),
                   " is on ", parameter.value().device(), " and not on the first device, ", devices.front());
  }
  const std::vector<at::Tensor> parts = input.chunk(static_cast<int64_t>(devices.size()), dim);
  if (parts.size() == 1) return forward(*module, input.to(devices.front()));
  const std::vector<at::Tensor> parameters = trained_parameters(*module);
  const bool to_input = at::GradMode::is_enabled() && input.requires_grad();
  const auto replicas = replicate(module, devices, parts, to_input);
  replicas->dim = at::maybe_wrap_dim(dim, input.dim());
  if (!at::GradMode::is_enabled() || (parameters.empty() && !to_input)) return replicas->run(forward);
  return DataParallelFunction::apply(replicas, &forward, input, at::TensorList(parameters));
}

}  // namespace muster::nn
