#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>

namespace muster::graph {

/// Calls an operator without Python. Compiled C++ code calls this function by its address, which it gets from the
/// operator muster::native_call_address, because it is not linked with muster
/// (python/muster/graph/_plan/native_calls.py writes the calls).
///
/// The arguments, in the order of the operator's schema, in three arrays: `tensors`, `numbers` (integers, truth values,
/// the length of a list, and 1 or 0 for a tensor that may be missing) and `texts`. The caller owns the `count` tensors
/// that are put into `results`; the first ones, if the operator returns more. Throws what the operator throws.
void native_call(const char* name, const AtenTensorHandle* tensors, const int64_t* numbers, const char* const* texts,
                 AtenTensorHandle* results, int64_t count);

}  // namespace muster::graph
