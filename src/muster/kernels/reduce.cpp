#include "muster/kernels/reduce.h"

#include <fmt/format.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "muster/base/check.h"
#include "muster/base/log.h"
#include "muster/kernels/kernels.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace muster {
namespace {

#if defined(__x86_64__)
bool cpu_has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}
bool cpu_has_avx2() { return __builtin_cpu_supports("avx2") && cpu_has_f16c(); }
bool cpu_has_avx512() {
  return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

const Kernels& choose_kernels() {
  const char* const wanted = std::getenv("MUSTER_SIMD");
  const std::string_view limit = wanted != nullptr ? wanted : "";
  const Kernels* best = &kBaselineKernels;
#if defined(__x86_64__)
  if (limit != "baseline" && cpu_has_avx2()) best = &kAvx2Kernels;
  if (limit != "baseline" && limit != "avx2" && cpu_has_avx512()) best = &kAvx512Kernels;
#endif
  if (!limit.empty() && limit != best->isa) {
    log(LogLevel::kWarning, fmt::format("MUSTER_SIMD={} is not an instruction set of this machine (baseline, avx2, "
                                        "avx512); using {}",
                                        limit, best->isa));
  }
  return *best;
}

// The elements that a kernel works on: `parts` of them for each element of the caller.
struct Operand {
  KernelElement element = kKernelElements;  ///< the default means that there are no kernels
  int parts = 1;
};

/// In the order of Dtype. Complex elements are not split into parts here.
constexpr Operand kOperands[kDtypeCount] = {{kU8},  {kI8},   {kI16},  {kI32},  {kI64}, {kF16}, {kF32}, {kF64}, {kC32},
                                            {kC64}, {kC128}, {kBool}, {kBf16}, {},     {},     {},     {},     {},
                                            {kU16}, {kU32},  {kU64},  {},      {},     {},     {}};

Operand operand_of(Dtype dtype, bool by_part) {
  if (by_part && dtype == Dtype::kComplex32) return {kF16, 2};
  if (by_part && dtype == Dtype::kComplex64) return {kF32, 2};
  if (by_part && dtype == Dtype::kComplex128) return {kF64, 2};
  return kOperands[static_cast<size_t>(dtype)];
}

/// In the order of ReduceOp: the kernels for numbers, and those for bool.
constexpr KernelOp kNumberOps[kReduceOpCount] = {kAdd, kAdd, kMultiply, kMin, kMax, kAnd, kOr, kXor, kAdd};
constexpr KernelOp kBoolOps[kReduceOpCount] = {kOr, kOr, kAnd, kAnd, kOr, kAnd, kOr, kXor, kOr};

struct Chosen {
  ReduceKernel kernel{};
  int parts = 1;
};
using Choices = std::array<std::array<Chosen, kReduceOpCount>, kDtypeCount>;

/// The kernels by dtype and operation. A table, because every call needs one. Pairs that are not reducible() have no
/// kernel.
Choices make_choices() {
  Choices choices;
  for (int d = 0; d < kDtypeCount; ++d) {
    for (int o = 0; o < kReduceOpCount; ++o) {
      const auto dtype = static_cast<Dtype>(d);
      const auto op = static_cast<ReduceOp>(o);
      if (!reducible(dtype, op)) continue;
      const KernelOp kernel = (dtype == Dtype::kBool ? kBoolOps : kNumberOps)[o];
      const Operand operand = operand_of(dtype, kernel != kMultiply);
      choices[d][o] = {kernels().reduce[operand.element][kernel], operand.parts};
    }
  }
  return choices;
}

const Chosen& find_kernel(Dtype dtype, ReduceOp op) {
  static const Choices choices = make_choices();
  const Chosen& chosen = choices[static_cast<size_t>(dtype)][static_cast<size_t>(op)];
  MUSTER_CHECK(chosen.kernel.two != nullptr, fmt::format("{} of {}", name(op), name(dtype)));
  return chosen;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose_kernels();
  return chosen;
}

void reduce_two(void* out, const void* a, const void* b, size_t count, Dtype dtype, ReduceOp op) {
  const Chosen& chosen = find_kernel(dtype, op);
  chosen.kernel.two(out, a, b, count * chosen.parts);
}

void reduce_into(void* to, const void* from, size_t count, Dtype dtype, ReduceOp op) {
  reduce_two(to, to, from, count, dtype, op);
}

void reduce_many(void* out, const void* const* in, int sources, size_t count, Dtype dtype, ReduceOp op) {
  MUSTER_CHECK(sources > 0, "nothing to reduce");
  const Chosen& chosen = find_kernel(dtype, op);
  if (sources == 1) {
    if (out != in[0] && count > 0) std::memcpy(out, in[0], count * size_of(dtype));
    return;
  }
  if (sources == 2) return chosen.kernel.two(out, in[0], in[1], count * chosen.parts);
  chosen.kernel.many(out, in, sources, count * chosen.parts);
}

void average_many(void* out, const void* const* in, int sources, size_t count, Dtype dtype) {
  MUSTER_CHECK(reducible(dtype, ReduceOp::kAverage), fmt::format("average of {}", name(dtype)));
  const Operand operand = operand_of(dtype, true);
  const auto mean = kernels().mean[operand.element];
  if (sources > 1 && mean != nullptr) return mean(out, in, sources, count * operand.parts);
  reduce_many(out, in, sources, count, dtype, ReduceOp::kAverage);
  divide_by(out, count, dtype, sources);
}

void divide_by(void* data, size_t count, Dtype dtype, int divisor) {
  MUSTER_CHECK(divisor > 0, "a divisor is a number of ranks");
  MUSTER_CHECK(reducible(dtype, ReduceOp::kAverage), fmt::format("average of {}", name(dtype)));
  if (divisor == 1) return;
  const Operand operand = operand_of(dtype, true);
  kernels().divide[operand.element](data, count * operand.parts, divisor);
}

void scale(void* out, const void* in, size_t count, Dtype dtype, double factor) {
  MUSTER_CHECK(reducible(dtype, ReduceOp::kPremulSum), fmt::format("a fraction of {}", name(dtype)));
  const Operand operand = operand_of(dtype, true);
  kernels().scale[operand.element](out, in, count * operand.parts, factor);
}

const char* reduce_kernel_isa() { return kernels().isa; }

}  // namespace muster
