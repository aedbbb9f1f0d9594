// Names that differ among the supported versions of torch (2.11 to 2.15).
#pragma once

#include <torch/headeronly/version.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

// Whether c10d::Backend has the names that end in _single.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 14
#define MUSTER_TORCH_HAS_SINGLE 0
#else
#define MUSTER_TORCH_HAS_SINGLE 1
#endif

// Whether c10d::ProcessGroup has them.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
#define MUSTER_TORCH_GROUP_HAS_SINGLE 0
#else
#define MUSTER_TORCH_GROUP_HAS_SINGLE 1
#endif

// Whether c10d::Backend has reconfigure(), and a rank and a size that may change.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 14
#define MUSTER_TORCH_HAS_RECONFIGURE 0
#else
#define MUSTER_TORCH_HAS_RECONFIGURE 1
#endif

// Whether c10::ScalarType has BComplex32.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 14
#define MUSTER_TORCH_HAS_BCOMPLEX32 0
#else
#define MUSTER_TORCH_HAS_BCOMPLEX32 1
#endif

// Whether c10::Stream tells its handle, such as a cudaStream_t.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
#define MUSTER_TORCH_HAS_NATIVE_STREAMS 0
#else
#define MUSTER_TORCH_HAS_NATIVE_STREAMS 1
#endif

namespace muster {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
using PreMulSumSupplement = c10d::NCCLPreMulSumSupplement;
#else
using PreMulSumSupplement = c10d::PreMulSumSupplement;
#endif

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12
inline constexpr c10d::OpType kReduceScatterTensors = c10d::OpType::_REDUCE_SCATTER_BASE;
#else
inline constexpr c10d::OpType kReduceScatterTensors = c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED;
#endif

}  // namespace muster
