#pragma once

// What muster uses of PMIx's binary interface, which is the same in the versions 3 to 6. The names and numbers are
// those of the PMIx standard. muster is built without PMIx, so its header is not here.

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace muster::mpi::pmix {

constexpr int kSuccess = 0, kError = -1, kNotSupported = -47, kOperationSucceeded = -157;
constexpr uint32_t kAllRanks = UINT32_MAX - 1;  ///< PMIX_RANK_WILDCARD

enum class Type : uint16_t { kString = 3, kUint16 = 13, kUint32 = 14, kInfo = 24, kDataArray = 39, kRank = 40 };

struct Proc {
  char nspace[256];
  uint32_t rank;
};

struct DataArray {
  Type type;
  size_t size;
  void* array;
};

struct Value {
  Type type;
  union {
    const char* string;
    uint16_t uint16;
    uint32_t uint32;
    const DataArray* array;
    uint64_t largest[3];
  };
};

struct Info {
  char key[512];
  uint32_t flags;
  Value value;
};
static_assert(sizeof(Info) == 552);

using OpDone = void(int status, void* data);
using ModexDone = void(int status, const char* bytes, size_t size, void* data, void (*release)(void*), void* released);

/// Callbacks of PMIx into the server. What is null is not supported.
struct ServerModule {
  void* client_connected;
  int (*client_finalized)(const Proc*, void* object, OpDone* done, void* data);
  int (*abort)(const Proc*, void* object, int status, const char* text, Proc*, size_t, OpDone* done, void* data);
  int (*fence)(const Proc*, size_t count, const Info*, size_t, char* bytes, size_t size, ModexDone* done, void* data);
  void* others_4_to_18[15];
  int (*job_control)(const Proc*, const Proc*, size_t, const Info*, size_t, void* done, void* data);
  void* others_from_20[40];
};

/// Functions of libpmix, without their prefix.
struct Functions {
  int (*server_init)(ServerModule* module, Info* infos, size_t count);
  int (*server_register_nspace)(const char* nspace, int ranks, Info* infos, size_t count, OpDone* done, void* data);
  int (*server_register_client)(const Proc*, uid_t, gid_t, void* object, OpDone* done, void* data);
  int (*server_setup_fork)(const Proc*, char*** environment);
  int (*server_finalize)();
  const char* (*Error_string)(int status);
};

}  // namespace muster::mpi::pmix
