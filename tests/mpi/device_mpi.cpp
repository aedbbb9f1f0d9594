// An MPI that takes memory of the device of the tests, as CUDA-aware MPI takes memory of a GPU: it finds the memory of
// the host behind such an address, and calls the MPI that it is linked to. As CUDA-aware MPI does, it looks for memory
// on the current device of the calling thread.
#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace {

using Pointer = void*;  // a handle, too: it is an int in MPICH, in the same register
using Address = void* (*)(void* address);
using CurrentDevice = int (*)();

std::atomic<Address> host_address = nullptr;
std::atomic<CurrentDevice> current_device = nullptr;
std::atomic<int> device = 0, device_buffers = 0, wrong_devices = 0;

void check_device() {
  if (device_buffers != 0 && current_device.load()() != device) ++wrong_devices;
}

void* reach(const void* buffer) {
  void* const given = const_cast<void*>(buffer);
  const Address find = host_address;
  void* const found = find != nullptr ? find(given) : given;
  if (found == given) return given;
  ++device_buffers;
  check_device();
  return found;
}

}  // namespace

extern "C" {

int PMPI_Allgather(const void*, int, Pointer, void*, int, Pointer, Pointer);
int PMPI_Allgatherv(const void*, int, Pointer, void*, const int*, const int*, Pointer, Pointer);
int PMPI_Alltoall(const void*, int, Pointer, void*, int, Pointer, Pointer);
int PMPI_Alltoallv(const void*, const int*, const int*, Pointer, void*, const int*, const int*, Pointer, Pointer);
int PMPI_Bcast(void*, int, Pointer, int, Pointer);
int PMPI_Gather(const void*, int, Pointer, void*, int, Pointer, int, Pointer);
int PMPI_Irecv(void*, int, Pointer, int, int, Pointer, Pointer*);
int PMPI_Isend(const void*, int, Pointer, int, int, Pointer, Pointer*);
int PMPI_Test(Pointer*, int*, Pointer);
int PMPI_Scatter(const void*, int, Pointer, void*, int, Pointer, int, Pointer);

/// From now on, the calls below take memory of the device with this index.
void device_mpi_take(int index, Address find_host_address, CurrentDevice find_current_device) {
  device = index;
  current_device = find_current_device;
  host_address = find_host_address;
}
/// How many buffers on the device the calls below have been given.
int device_mpi_buffers() { return device_buffers; }
/// How many of these calls, and of those that may move such buffers later, came from a thread with another current
/// device.
int device_mpi_wrong_devices() { return wrong_devices; }

/// As CUDA-aware MPI has it.
int MPIX_Query_cuda_support() {
  const char* const takes = std::getenv("DEVICE_MPI_TAKES_CUDA");
  return takes != nullptr && *takes == '1' ? 1 : 0;
}

int MPI_Allgather(const void* from, int sent, Pointer sends, void* to, int received, Pointer receives, Pointer comm) {
  return PMPI_Allgather(reach(from), sent, sends, reach(to), received, receives, comm);
}
int MPI_Allgatherv(const void* from, int sent, Pointer sends, void* to, const int* lengths, const int* offsets,
                   Pointer receives, Pointer comm) {
  return PMPI_Allgatherv(reach(from), sent, sends, reach(to), lengths, offsets, receives, comm);
}
int MPI_Alltoall(const void* from, int sent, Pointer sends, void* to, int received, Pointer receives, Pointer comm) {
  return PMPI_Alltoall(reach(from), sent, sends, reach(to), received, receives, comm);
}
int MPI_Alltoallv(const void* from, const int* sent, const int* sent_at, Pointer sends, void* to, const int* received,
                  const int* received_at, Pointer receives, Pointer comm) {
  return PMPI_Alltoallv(reach(from), sent, sent_at, sends, reach(to), received, received_at, receives, comm);
}
int MPI_Bcast(void* buffer, int count, Pointer type, int root, Pointer comm) {
  return PMPI_Bcast(reach(buffer), count, type, root, comm);
}
int MPI_Gather(const void* from, int sent, Pointer sends, void* to, int received, Pointer receives, int root,
               Pointer comm) {
  return PMPI_Gather(reach(from), sent, sends, reach(to), received, receives, root, comm);
}
int MPI_Irecv(void* buffer, int count, Pointer type, int from, int tag, Pointer comm, Pointer* request) {
  return PMPI_Irecv(reach(buffer), count, type, from, tag, comm, request);
}
int MPI_Isend(const void* buffer, int count, Pointer type, int to, int tag, Pointer comm, Pointer* request) {
  return PMPI_Isend(reach(buffer), count, type, to, tag, comm, request);
}
int MPI_Test(Pointer* request, int* done, Pointer status) {
  check_device();
  return PMPI_Test(request, done, status);
}
int MPI_Scatter(const void* from, int sent, Pointer sends, void* to, int received, Pointer receives, int root,
                Pointer comm) {
  return PMPI_Scatter(reach(from), sent, sends, reach(to), received, receives, root, comm);
}
}
