#include "muster/torch/nn/clip_grad.h"

#include <ATen/ATen.h>

#include <cmath>

#include "muster/torch/c10d/arguments.h"
#include "muster/torch/collectives.h"

namespace muster::nn {
namespace {

/// The sum of |x|^p over all elements; the maximum of |x| for infinity; the number of gradients for 0.
double part_of_norm(const std::vector<at::Tensor>& gradients, double norm_type) {
  if (norm_type == 0) return static_cast<double>(gradients.size());
  std::vector<at::Tensor> norms;
  for (const at::Tensor& gradient : gradients) {
    if (gradient.numel() > 0) norms.push_back(at::linalg_vector_norm(gradient, norm_type).to(at::kDouble));
  }
  if (norms.empty()) return 0;
  const at::Tensor all = at::stack(norms);
  return std::isinf(norm_type) ? all.max().item<double>() : all.pow(norm_type).sum().item<double>();
}

}  // namespace

double clip_grad_norm_(Group& group, const std::vector<at::Tensor>& mine, double max_norm, double norm_type,
                       bool error_if_nonfinite) {
  check_argument(norm_type >= 0, "clip_grad_norm_", "norm_type must be >= 0, got ", norm_type);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : mine) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  const at::Tensor total = at::scalar_tensor(part_of_norm(gradients, norm_type), at::kDouble);
  all_reduce(group, total, std::isinf(norm_type) ? ReduceOp::kMax : ReduceOp::kSum);
  const bool is_sum_of_powers = norm_type > 0 && !std::isinf(norm_type);
  const double norm = is_sum_of_powers ? std::pow(total.item<double>(), 1 / norm_type) : total.item<double>();
  check_argument(!error_if_nonfinite || std::isfinite(norm), "clip_grad_norm_", "the gradients' norm of order ",
                 norm_type, " is ", norm, ", so they cannot be clipped");
  const double scale = max_norm / (norm + 1e-6);
  if (!(scale >= 1)) {
    for (const at::Tensor& gradient : gradients) gradient.mul_(scale);
  }
  return norm;
}

}  // namespace muster::nn
