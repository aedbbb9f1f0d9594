#pragma once

#include <cstddef>

#include "muster/base/dtype.h"

namespace muster {

/// to[i] = to[i] op from[i]. For kAverage and kPremulSum, op is the sum. The dtype and the operation must pass
/// check_reducible(). float16 and bfloat16 are combined in float32 and rounded to nearest even. Buffers may be
/// unaligned. They may be equal, but must not overlap otherwise.
void reduce_into(void* to, const void* from, size_t count, Dtype dtype, ReduceOp op);
/// out[i] = a[i] op b[i]; `out` may equal a or b.
void reduce_two(void* out, const void* a, const void* b, size_t count, Dtype dtype, ReduceOp op);
/// out[i] = in[0][i] op in[1][i] op ... of `sources` inputs, in that order, with one pass over memory; float16 and
/// bfloat16 are rounded once, at the end. `out` may equal any input.
void reduce_many(void* out, const void* const* in, int sources, size_t count, Dtype dtype, ReduceOp op);
/// out[i] = (in[0][i] + in[1][i] + ...) / sources: kAverage of all inputs at once. float16 and bfloat16 are added up
/// and divided in float32, and rounded once, so the result is finite if the mean is. `out` may equal any input.
void average_many(void* out, const void* const* in, int sources, size_t count, Dtype dtype);
/// data[i] /= divisor: the second step of kAverage. Integers round toward zero, as torch's do.
void divide_by(void* data, size_t count, Dtype dtype, int divisor);
/// out[i] = in[i] * factor: the first step of kPremulSum, for the dtypes that it supports. float64 is multiplied in
/// double, all others in float, rounded once. `out` may equal `in`.
void scale(void* out, const void* in, size_t count, Dtype dtype, double factor);

/// The instruction set in use: "avx512", "avx2", "baseline". MUSTER_SIMD=baseline|avx2|avx512 overrides it.
const char* reduce_kernel_isa();

}  // namespace muster
