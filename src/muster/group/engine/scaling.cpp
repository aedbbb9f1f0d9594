#include "muster/group/engine/scaling.h"

#include <bit>

#include "muster/kernels/reduce.h"

namespace muster {
namespace {

bool ends_at(const Call& call, Rank rank) { return call.collective != Collective::kReduce || call.root == rank; }

}  // namespace

/// A float16 sum overflows long before the average does, so inputs are scaled down first. The factor is a power of two,
/// which is exact except for subnormal numbers.
double input_factor(const Operation& operation, int size) {
  const Call& call = operation.call;
  if (!reduces(call.collective)) return 1;
  if (call.op == ReduceOp::kPremulSum) return operation.factor;
  const bool narrow = call.dtype == Dtype::kFloat16 || call.dtype == Dtype::kComplex32;
  return narrow && call.op == ReduceOp::kAverage ? 1.0 / std::bit_ceil(static_cast<unsigned>(size)) : 1;
}

Operation scale_input(Operation operation, double factor, Rank self, Bytes& copy) {
  const Call& call = operation.call;
  const bool in_place = call.collective != Collective::kReduceScatter && ends_at(call, self);
  if (!in_place) {
    copy.resize(operation.input.bytes());
    operation.input.read(0, copy.data(), copy.size());
    operation.input = {copy.data(), operation.input.count(), call.dtype};
  }
  operation.input.visit(0, operation.input.bytes(), [&](uint8_t* data, size_t bytes) {
    scale(data, data, bytes / size_of(call.dtype), call.dtype, factor);
  });
  return operation;
}

void finish_average(const Operation& operation, double factor, int size, Rank self) {
  const Call& call = operation.call;
  if (!reduces(call.collective) || call.op != ReduceOp::kAverage || !ends_at(call, self)) return;
  operation.output.visit(0, operation.output.bytes(), [&](uint8_t* data, size_t bytes) {
    const size_t count = bytes / size_of(call.dtype);
    if (factor == 1) {
      divide_by(data, count, call.dtype, size);
    } else {
      scale(data, data, count, call.dtype, 1 / (factor * size));
    }
  });
}

}  // namespace muster
