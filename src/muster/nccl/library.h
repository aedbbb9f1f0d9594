#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
#include <string>

#include "muster/base/error.h"

namespace muster::nccl {

/// ncclComm_t and cudaStream_t.
using Comm = void*;
using Stream = void*;

struct UniqueId {
  char bytes[128];
};

// Values of nccl.h. They have not changed since 2.10.
inline constexpr int kSuccess = 0, kInProgress = 7;
enum class Type : int { kInt8, kUint8, kInt32, kUint32, kInt64, kUint64, kFloat16, kFloat32, kFloat64, kBfloat16 };
enum class RedOp : int { kSum, kProduct, kMax, kMin, kAverage };

/// ncclConfig_t of NCCL 2.17. Newer libraries accept it.
struct Config {
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21700;
  int blocking = INT_MIN;
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

/// The functions of NCCL that muster calls, without their prefix.
struct Functions {
  int (*GetVersion)(int* version);
  int (*GetUniqueId)(UniqueId* id);
  const char* (*GetErrorString)(int code);
  const char* (*GetLastError)(Comm comm);
  int (*CommInitRankConfig)(Comm* comm, int size, UniqueId id, int rank, Config* config);
  int (*CommInitRankScalable)(Comm* comm, int size, int rank, int roots, UniqueId* ids, Config* config);  ///< or null
  int (*CommGetAsyncError)(Comm comm, int* error);
  int (*CommFinalize)(Comm comm);
  int (*CommDestroy)(Comm comm);
  int (*CommAbort)(Comm comm);
  int (*GroupStart)();
  int (*GroupEnd)();
  int (*AllReduce)(const void*, void*, size_t count, Type type, int op, Comm comm, Stream stream);
  int (*Reduce)(const void*, void*, size_t count, Type type, int op, int root, Comm comm, Stream stream);
  int (*Broadcast)(const void*, void*, size_t count, Type type, int root, Comm comm, Stream stream);
  int (*AllGather)(const void*, void*, size_t count, Type type, Comm comm, Stream stream);
  int (*ReduceScatter)(const void*, void*, size_t count, Type type, int op, Comm comm, Stream stream);
  int (*Send)(const void*, size_t count, Type type, int peer, Comm comm, Stream stream);
  int (*Recv)(void*, size_t count, Type type, int peer, Comm comm, Stream stream);
  int (*RedOpCreatePreMulSum)(int* op, void* factor, Type type, int residence, Comm comm);
  int (*RedOpDestroy)(int op, Comm comm);
};

/// libnccl as it is installed, 2.21 or newer. It is loaded at run time, so muster is built without CUDA.
class Library : public Functions {
 public:
  /// The library of this process. Loads it at the first call: MUSTER_NCCL_LIBRARY, or one that the process has loaded
  /// already, as torch does, or libnccl.so.2. kUnavailable says what was tried. Thread-safe.
  static Result<const Library*> get();

  /// "NCCL 2.27.3, libnccl.so.2".
  const std::string& version() const { return version_; }
  /// Turns a return code into an error that names the call. In progress is no error.
  Result<> check(int code, const char* call, Comm comm = nullptr) const;

 private:
  Result<> load(const std::string& file, void* loaded);

  std::string version_;
};

}  // namespace muster::nccl
