#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/error.h"

namespace muster::mpi {

/// A handle of MPI: a pointer in Open MPI and in the MPI ABI, an int in MPICH. Functions that take an int read the low
/// half of the register, and functions that return one write the low half of a handle that was null.
using Handle = void*;

/// Large enough for every implementation. Library::source_offset says where MPI_SOURCE is.
struct alignas(8) Status {
  uint8_t bytes[64];
};

using UserFunction = void(void* in, void* in_and_out, int* length, Handle* type);

/// The functions of MPI that muster calls, without their prefix.
struct Functions {
  int (*Abort)(Handle comm, int code);
  int (*Allgather)(const void*, int, Handle, void*, int, Handle, Handle comm);
  int (*Allgatherv)(const void*, int, Handle, void*, const int*, const int*, Handle, Handle comm);
  int (*Allreduce)(const void*, void*, int, Handle type, Handle op, Handle comm);
  int (*Alltoall)(const void*, int, Handle, void*, int, Handle, Handle comm);
  int (*Alltoallv)(const void*, const int*, const int*, Handle, void*, const int*, const int*, Handle, Handle comm);
  int (*Barrier)(Handle comm);
  int (*Bcast)(void*, int, Handle type, int root, Handle comm);
  int (*Cancel)(Handle* request);
  int (*Comm_create_group)(Handle comm, Handle group, int tag, Handle* made);
  int (*Comm_dup)(Handle comm, Handle* made);
  int (*Comm_free)(Handle* comm);
  int (*Comm_get_attr)(Handle comm, int key, void* value, int* found);
  int (*Comm_group)(Handle comm, Handle* group);
  int (*Comm_rank)(Handle comm, int* rank);
  int (*Comm_set_errhandler)(Handle comm, Handle handler);
  int (*Comm_size)(Handle comm, int* size);
  int (*Error_class)(int code, int* error_class);
  int (*Error_string)(int code, char* text, int* length);
  int (*Finalize)();
  int (*Finalized)(int* done);
  int (*Gather)(const void*, int, Handle, void*, int, Handle, int root, Handle comm);
  int (*Get_count)(const Status*, Handle type, int* count);
  int (*Get_library_version)(char* text, int* length);
  int (*Group_free)(Handle* group);
  int (*Group_incl)(Handle group, int count, const int* ranks, Handle* made);
  int (*Init_thread)(int* argc, char*** argv, int asked, int* provided);
  int (*Initialized)(int* done);
  int (*Irecv)(void*, int, Handle type, int from, int tag, Handle comm, Handle* request);
  int (*Isend)(const void*, int, Handle type, int to, int tag, Handle comm, Handle* request);
  int (*Op_create)(UserFunction* function, int commutes, Handle* op);
  int (*Op_free)(Handle* op);
  int (*Query_thread)(int* provided);
  int (*Reduce)(const void*, void*, int, Handle type, Handle op, int root, Handle comm);
  int (*Reduce_scatter)(const void*, void*, const int*, Handle type, Handle op, Handle comm);
  int (*Reduce_scatter_block)(const void*, void*, int, Handle type, Handle op, Handle comm);
  int (*Scatter)(const void*, int, Handle, void*, int, Handle, int root, Handle comm);
  int (*Test)(Handle* request, int* done, Status* status);
  int (*Test_cancelled)(const Status*, int* canceled);
  int (*Type_commit)(Handle* type);
  int (*Type_contiguous)(int count, Handle type, Handle* made);
  int (*Type_free)(Handle* type);
};

/// Constants that differ among implementations.
struct Constants {
  Handle comm_world, errors_return;
  Handle byte, int8, uint8, int16, uint16, int32, uint32, int64, uint64, float32, float64, complex64, complex128;
  Handle sum, product, min, max, bit_and, bit_or, bit_xor;
  void* in_place;
  int any_source, tag_upper_bound_key, thread_multiple, error_truncate;
  size_t source_offset;  ///< of MPI_SOURCE in a Status
};

/// MPI as it is installed: Open MPI 4 or 5, MPICH 4 and what has its ABI, or the ABI of MPI 5. It is loaded at run
/// time, so muster is built without MPI.
class Library : public Functions, public Constants {
 public:
  /// The library of this process. Loads it at the first call: MUSTER_MPI_LIBRARY, or one that the process has loaded
  /// already, or the one that fits the launcher. kUnavailable says what was tried. Thread-safe.
  static Result<const Library*> get();

  /// "Open MPI 4.1.4".
  const std::string& version() const { return version_; }
  /// Turns a return code into an error that names the call.
  Result<> check(int code, const char* call) const;
  int source_of(const Status& status) const;
  /// True if the library says that its calls take memory of such a device ("cuda" or "xpu", as torch names it).
  /// MUSTER_MPI_DEVICE_MEMORY (1 or 0) overrides its answer, for all devices. MPI must be initialized.
  bool takes_device_memory(std::string_view device_type) const;

 private:
  /// A function that returns 1 if the library takes memory of such a device.
  struct DeviceQuery {
    std::string_view device_type;
    int (*function)();
  };
  Result<> load(const std::string& file, void* loaded);
  Result<> load_functions(void* loaded, const std::string& file);
  Result<> load_device_queries(void* loaded);

  std::string version_;
  std::vector<DeviceQuery> device_queries_;
  std::optional<bool> device_memory_;  ///< of the environment
};

}  // namespace muster::mpi
