#pragma once

#include <cstddef>
#include <cstdint>

#include "muster/base/dtype.h"

// Kernels that compress gradients before they are sent (torch/hooks.h). All functions give the same bits on every
// instruction set, work in the caller's thread and allocate nothing unless they say so. Arrays do not overlap.

namespace muster {

/// out[i] = in[i] * factor in `half`, kFloat16 or kBfloat16, rounded to nearest even. Values beyond the range of
/// float16 become infinite.
void narrow(void* out, const float* in, size_t count, Dtype half, float factor);
/// out[i] = in[i] as float32; `half` is kFloat16 or kBfloat16.
void widen(float* out, const void* in, size_t count, Dtype half);

/// Quantizes in[i] * factor + error[i] to int8. Every `block` elements have one scale: the greatest magnitude of the
/// block / 127. error[i] becomes the part that was lost (error feedback: Seide et al. 2014, Karimireddy et al. 2019).
/// `scales` has ceil(count / block) elements. A block with an infinity or a NaN becomes all NaN, and its errors become
/// 0.
void quantize(int8_t* out, float* scales, const float* in, float factor, float* error, size_t count, size_t block);
/// out[i] = scales[i / block] * in[i].
void dequantize(float* out, const int8_t* in, const float* scales, size_t count, size_t block);
/// sum[i] += scales[i / block] * in[i].
void add_quantized(float* sum, const int8_t* in, const float* scales, size_t count, size_t block);

/// The positions of the `wanted` elements of greatest magnitude, ascending, 0 < wanted <= count < 2^32. Elements whose
/// magnitudes agree in their first 16 bits (to 1/128) count as equal; of these, the first ones are selected. NaN is the
/// greatest. Reads `in` twice. Allocates 128 KiB for the time of the call.
void select_largest(uint32_t* positions, size_t wanted, const float* in, size_t count);

// PowerSGD (Vogels et al. 2019) approximates a matrix m of `rows` x `columns` by a product p * q of rank `rank`. m is
// row-major, p is rows x rank, q is rank x columns (the paper's Q, transposed).

/// p = m * transposed(q).
void project_rows(float* p, const float* m, const float* q, size_t rows, size_t columns, size_t rank);
/// Makes p's columns orthonormal (modified Gram-Schmidt); a column that depends on the columns before it becomes 0.
void orthogonalize(float* p, size_t rows, size_t rank);
/// q = transposed(p) * m.
void project_columns(float* q, const float* m, const float* p, size_t rows, size_t columns, size_t rank);
/// out = p * q, error -= out.
void expand(float* out, float* error, const float* p, const float* q, size_t rows, size_t columns, size_t rank);

}  // namespace muster
