#pragma once

#include <stddef.h>
#include <stdint.h>

// Included by the translation units that are compiled for one instruction set. It must not have inline code: the linker
// keeps one copy of an inline function for the whole program, and that could be the AVX-512 copy.

namespace muster {

/// Element types with kernels of their own. A complex sum is a sum of twice as many parts; only the product differs.
enum KernelElement {
  kU8,
  kU16,
  kU32,
  kU64,
  kI8,
  kI16,
  kI32,
  kI64,
  kF32,
  kF64,
  kF16,
  kBf16,
  kBool,
  kC32,
  kC64,
  kC128,
  kKernelElements
};
enum KernelOp { kAdd, kMultiply, kMin, kMax, kAnd, kOr, kXor, kKernelOps };

/// Null if the operation is not defined for the element type.
struct ReduceKernel {
  void (*two)(void* out, const void* a, const void* b, size_t count);
  void (*many)(void* out, const void* const* in, int sources, size_t count);  // sources >= 2
};

/// The functions of compress.h with the same names, for one instruction set.
struct CompressKernels {
  void (*narrow_f16)(void* out, const float* in, size_t count, float factor);
  void (*narrow_bf16)(void* out, const float* in, size_t count, float factor);
  void (*widen_f16)(float* out, const void* in, size_t count);
  void (*widen_bf16)(float* out, const void* in, size_t count);
  void (*quantize)(int8_t* out, float* scales, const float* in, float factor, float* error, size_t count, size_t block);
  void (*dequantize)(float* out, const int8_t* in, const float* scales, size_t count, size_t block);
  void (*add_quantized)(float* sum, const int8_t* in, const float* scales, size_t count, size_t block);
  void (*project_rows)(float* p, const float* m, const float* q, size_t rows, size_t columns, size_t rank);
  void (*project_columns)(float* q, const float* m, const float* p, size_t rows, size_t columns, size_t rank);
  void (*expand)(float* out, float* error, const float* p, const float* q, size_t rows, size_t columns, size_t rank);
};

/// All kernels for one instruction set.
struct Kernels {
  const char* isa;
  ReduceKernel reduce[kKernelElements][kKernelOps];
  void (*divide[kKernelElements])(void* data, size_t count, int divisor);  // divisor > 0
  // Only for elements whose rounded sum would be too inexact to divide (float16, bfloat16); else null. sources >= 2
  void (*mean[kKernelElements])(void* out, const void* const* in, int sources, size_t count);
  void (*scale[kKernelElements])(void* out, const void* in, size_t count, double factor);
  CompressKernels compress;
};

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

/// The kernels for the instruction set in use, see reduce_kernel_isa().
const Kernels& kernels();

}  // namespace muster
