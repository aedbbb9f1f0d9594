#pragma once

#include <stddef.h>
#include <stdint.h>

// Like reduce_kernels.h, this header must not have inline code.

namespace muster {

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

extern const CompressKernels kBaselineCompress;
#if defined(__x86_64__)
extern const CompressKernels kAvx2Compress;
extern const CompressKernels kAvx512Compress;
#endif

}  // namespace muster
