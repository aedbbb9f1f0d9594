#pragma once

#include <ATen/autocast_mode.h>

namespace muster::nn {

/// Mixed precision, as Python's torch.autocast("cpu", dtype). While an Autocast exists, matrix products and
/// convolutions of this thread on the CPU use at::kBFloat16 or at::kHalf; sums and norms use float32. Parameters and
/// gradients stay float32.
///
///   const auto loss = [&] {
///     const muster::nn::Autocast autocast(at::kBFloat16);
///     return cross_entropy(ddp.forward(images), digits);
///   }();
///   loss.backward();  // outside
class [[nodiscard]] Autocast {
 public:
  explicit Autocast(at::ScalarType dtype)
      : enabled_before_(at::autocast::is_autocast_enabled(at::kCPU)),
        dtype_before_(at::autocast::get_autocast_dtype(at::kCPU)) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, dtype);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0)
      at::autocast::clear_cache();  // it holds casts of parameters, which change
    at::autocast::set_autocast_enabled(at::kCPU, enabled_before_);
    at::autocast::set_autocast_dtype(at::kCPU, dtype_before_);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  const bool enabled_before_;
  const at::ScalarType dtype_before_;
};

}  // namespace muster::nn
