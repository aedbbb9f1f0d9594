#include "muster/kernels/compress.h"

#include <bit>
#include <cmath>
#include <vector>

#include "muster/base/check.h"
#include "muster/kernels/kernels.h"

namespace muster {
namespace {

/// The exponent and the first 7 bits of the fraction. These numbers have the order of the magnitudes, with NaN last.
uint32_t coarse_magnitude(float value) { return std::bit_cast<uint32_t>(value) >> 16 & 0x7fffU; }

/// Subtracts from column `to` its projection onto column `from`, which is normalized.
void remove_column(float* p, size_t rows, size_t rank, size_t from, size_t to) {
  double shared = 0;
  for (size_t i = 0; i < rows; ++i) shared += static_cast<double>(p[i * rank + from]) * p[i * rank + to];
  for (size_t i = 0; i < rows; ++i) {
    p[i * rank + to] = static_cast<float>(p[i * rank + to] - shared * p[i * rank + from]);
  }
}

double column_norm(const float* p, size_t rows, size_t rank, size_t column) {
  double square = 0;
  for (size_t i = 0; i < rows; ++i) square += static_cast<double>(p[i * rank + column]) * p[i * rank + column];
  return std::sqrt(square);
}

}  // namespace

void narrow(void* out, const float* in, size_t count, Dtype half, float factor) {
  MUSTER_CHECK(half == Dtype::kFloat16 || half == Dtype::kBfloat16, "no half-precision dtype");
  (half == Dtype::kFloat16 ? kernels().compress.narrow_f16 : kernels().compress.narrow_bf16)(out, in, count, factor);
}

void widen(float* out, const void* in, size_t count, Dtype half) {
  MUSTER_CHECK(half == Dtype::kFloat16 || half == Dtype::kBfloat16, "no half-precision dtype");
  (half == Dtype::kFloat16 ? kernels().compress.widen_f16 : kernels().compress.widen_bf16)(out, in, count);
}

void quantize(int8_t* out, float* scales, const float* in, float factor, float* error, size_t count, size_t block) {
  MUSTER_CHECK(block > 0, "a block has elements");
  kernels().compress.quantize(out, scales, in, factor, error, count, block);
}

void dequantize(float* out, const int8_t* in, const float* scales, size_t count, size_t block) {
  kernels().compress.dequantize(out, in, scales, count, block);
}

void add_quantized(float* sum, const int8_t* in, const float* scales, size_t count, size_t block) {
  kernels().compress.add_quantized(sum, in, scales, count, block);
}

void select_largest(uint32_t* positions, size_t wanted, const float* in, size_t count) {
  MUSTER_CHECK(wanted > 0 && wanted <= count, "more elements are wanted than there are");
  MUSTER_CHECK(count <= UINT32_MAX, "positions are numbers of 32 bits");
  std::vector<uint32_t> number(0x8000);  // the number of elements with each coarse magnitude
  for (size_t i = 0; i < count; ++i) ++number[coarse_magnitude(in[i])];
  // The least magnitude that is selected. Of its elements, only the first `missing` ones are.
  uint32_t least = 0x7fff;
  size_t missing = wanted;
  for (; number[least] < missing; --least) missing -= number[least];
  for (size_t i = 0; i < count; ++i) {
    const uint32_t magnitude = coarse_magnitude(in[i]);
    if (magnitude < least || (magnitude == least && missing == 0)) continue;
    if (magnitude == least) --missing;
    *positions++ = static_cast<uint32_t>(i);
  }
}

void project_rows(float* p, const float* m, const float* q, size_t rows, size_t columns, size_t rank) {
  kernels().compress.project_rows(p, m, q, rows, columns, rank);
}

void orthogonalize(float* p, size_t rows, size_t rank) {
  constexpr double kDependent = 1e-5;  // a smaller part of the norm is rounding error
  for (size_t column = 0; column < rank; ++column) {
    const double before = column_norm(p, rows, rank, column);
    for (size_t earlier = 0; earlier < column; ++earlier) remove_column(p, rows, rank, earlier, column);
    const double norm = column_norm(p, rows, rank, column);
    // A NaN stays a NaN, so that the caller can detect it.
    const double factor = norm <= before * kDependent ? 0 : 1 / norm;
    for (size_t i = 0; i < rows; ++i) p[i * rank + column] = static_cast<float>(p[i * rank + column] * factor);
  }
}

void project_columns(float* q, const float* m, const float* p, size_t rows, size_t columns, size_t rank) {
  kernels().compress.project_columns(q, m, p, rows, columns, rank);
}

void expand(float* out, float* error, const float* p, const float* q, size_t rows, size_t columns, size_t rank) {
  kernels().compress.expand(out, error, p, q, rows, columns, rank);
}

}  // namespace muster
