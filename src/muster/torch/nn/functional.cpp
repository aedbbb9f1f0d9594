#include "muster/torch/nn/functional.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <functional>
#include <utility>

#include "muster/torch/c10d/arguments.h"
#include "muster/torch/collectives.h"

namespace muster::nn::functional {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using LinearMap = std::function<at::Tensor(const at::Tensor&)>;

/// Puts a map into an AutogradContext, which holds only IValues.
struct MapHolder : torch::CustomClassHolder {
  explicit MapHolder(LinearMap held) : map(std::move(held)) {}
  LinearMap map;
};

/// Applies `map`, a linear map from the inputs of all ranks to the outputs of all ranks. The gradient is the result of
/// its transpose, which is differentiable itself.
struct LinearCollective : torch::autograd::Function<LinearCollective> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const LinearMap& map,
                            const LinearMap& transpose) {
    context->saved_data["transpose"] = c10::IValue::make_capsule(c10::make_intrusive<MapHolder>(transpose));
    return map(input);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto holder = context->saved_data["transpose"].toCapsule();
    return {static_cast<const MapHolder&>(*holder).map(gradients[0]), at::Tensor(), at::Tensor()};
  }
};

at::Tensor apply_linear(const at::Tensor& input, const LinearMap& map, const LinearMap& transpose) {
  return LinearCollective::apply(input, map, transpose);
}

void check_linear(ReduceOp op, const char* title) {
  check_argument(op == ReduceOp::kSum || op == ReduceOp::kAverage, title, "only sum and avg have a gradient, not ",
                 name(op));
}

at::Tensor copy_of(const at::Tensor& tensor) { return tensor.clone(at::MemoryFormat::Contiguous); }

/// The factor of a kSum of which `op` is a multiple.
double scale_of(const Group& group, ReduceOp op) { return op == ReduceOp::kAverage ? 1. / group.membership().size : 1; }

}  // namespace

at::Tensor all_reduce(const std::shared_ptr<Group>& group, const at::Tensor& tensor, ReduceOp op) {
  check_linear(op, "all_reduce");
  const auto map = [group, op](const at::Tensor& input) {
    at::Tensor output = copy_of(input);
    muster::all_reduce(*group, output, op);
    return output;
  };
  return apply_linear(tensor, map,
                      [group, op](const at::Tensor& gradient) { return functional::all_reduce(group, gradient, op); });
}

at::Tensor reduce(const std::shared_ptr<Group>& group, const at::Tensor& tensor, ReduceOp op, Rank root) {
  check_linear(op, "reduce");
  const auto map = [group, op, root](const at::Tensor& input) {
    at::Tensor output = copy_of(input);
    muster::reduce(*group, output, op, root);
    return group->membership().rank == root ? output : at::zeros_like(output);
  };
  return apply_linear(tensor, map, [group, op, root](const at::Tensor& gradient) {
    return functional::broadcast(group, gradient, root) * scale_of(*group, op);
  });
}

at::Tensor broadcast(const std::shared_ptr<Group>& group, const at::Tensor& tensor, Rank root) {
  const auto map = [group, root](const at::Tensor& input) {
    at::Tensor output = copy_of(input);
    muster::broadcast(*group, output, root);
    return output;
  };
  return apply_linear(tensor, map, [group, root](const at::Tensor& gradient) {
    return functional::reduce(group, gradient, ReduceOp::kSum, root);
  });
}

at::Tensor all_gather(const std::shared_ptr<Group>& group, const at::Tensor& tensor) {
  return apply_linear(
      tensor, [group](const at::Tensor& input) { return muster::all_gather(*group, input); },
      [group](const at::Tensor& gradient) { return functional::reduce_scatter(group, gradient); });
}

at::Tensor reduce_scatter(const std::shared_ptr<Group>& group, const at::Tensor& tensors, ReduceOp op) {
  check_linear(op, "reduce_scatter");
  return apply_linear(
      tensors, [group, op](const at::Tensor& input) { return muster::reduce_scatter(*group, input, op); },
      [group, op](const at::Tensor& gradient) {
        return functional::all_gather(group, gradient) * scale_of(*group, op);
      });
}

at::Tensor all_to_all(const std::shared_ptr<Group>& group, const at::Tensor& tensors) {
  return apply_linear(
      tensors, [group](const at::Tensor& input) { return muster::all_to_all(*group, input); },
      [group](const at::Tensor& gradient) { return functional::all_to_all(group, gradient); });
}

}  // namespace muster::nn::functional
