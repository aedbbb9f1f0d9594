// NCCL's functions, as libnccl.so has them, over the ranks of one host. MUSTER_NCCL_LIBRARY names this library in
// tests.
//
// Like NCCL: calls give kernels to a stream and return; calls in a group become one kernel; ncclCommAbort() ends
// kernels that wait for a peer. It and ncclCommDestroy() wait until no graph has a kernel of the communicator. A
// communicator that is not blocking is in progress until all ranks have come, and after each call until
// ncclCommGetAsyncError() has said so a few times: only then its kernel is in the stream.
//
// FAKE_NCCL_VERSION=22005 is the version that it says it is. Functions for tests, of this process:
// - fake_nccl_let_next_kernel(1): the next kernel hangs until its communicator is aborted. (2): so does it, and the
//   communicator has an error.
// - fake_nccl_fail_init(rank): the start of a communicator fails at that rank, as if another rank used its GPU.
//   fake_nccl_hang_init(rank): it never ends.
// - fake_nccl_kernels(), fake_nccl_aborts(): how many kernels there were, and calls of ncclCommAbort().
#include <fmt/format.h>

#include <bit>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string_view>
#include <thread>
#include <utility>

#include "device/stream_handle.h"
#include "muster/base/hash.h"
#include "muster/base/random.h"
#include "nccl/operations.h"

namespace muster::fake_nccl {
namespace {

using device_double::StreamHandle;

constexpr int kSuccess = 0, kInvalidArgument = 4, kInvalidUsage = 5;
constexpr Dtype kTypes[] = {Dtype::kInt8,   Dtype::kUint8,   Dtype::kInt32,   Dtype::kUint32,  Dtype::kInt64,
                            Dtype::kUint64, Dtype::kFloat16, Dtype::kFloat32, Dtype::kFloat64, Dtype::kBfloat16};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kAverage};
constexpr int kOwnOps = 5;

constexpr int kLooks = 3;  ///< at a communicator that is in progress, before it is not

struct Config {
  size_t size;
  unsigned int magic, version;
  int blocking;
};

struct Handle {
  std::shared_ptr<Communicator> communicator;
  bool blocking = true;
  std::vector<double> factors = {};                  ///< of the operations that were made
  int looks_left = 0;                                ///< until it is no longer in progress
  std::vector<std::function<void()>> launches = {};  ///< when it no longer is

  int state() const { return looks_left > 0 ? Communicator::kInProgress : communicator->error.load(); }
};

struct Call {
  Handle* handle;
  StreamHandle* stream;
  Operation operation;
};

thread_local int depth = 0;
thread_local std::vector<Call> grouped;
std::atomic<int> next_kernel = 0;  ///< 1: hangs; 2: and has an error
std::atomic<int> kernels = 0;
std::atomic<int> aborts = 0;
std::atomic<int> failing_rank = -1, hanging_rank = -1;  ///< in the start of communicators
std::atomic<int> roots = 0;                             ///< of the last communicator with several

double value_of(const void* number, Dtype dtype) {
  if (dtype == Dtype::kFloat64) return *static_cast<const double*>(number);
  if (dtype == Dtype::kFloat32) return *static_cast<const float*>(number);
  const uint16_t bits = *static_cast<const uint16_t*>(number);
  if (dtype == Dtype::kBfloat16) return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  const int exponent = (bits >> 10 & 0x1F) - 15;  // a normal float16
  return std::ldexp(1 + (bits & 0x3FF) / 1024.0, exponent) * ((bits & 0x8000) != 0 ? -1 : 1);
}

void wait_for_abort(const Communicator& communicator) {
  while (!communicator.aborted) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // tidy: allow(sleep) a kernel that hangs
  }
}

void wait_for_kernels(const Communicator& communicator) {
  while (communicator.kernels > 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // tidy: allow(sleep) NCCL waits so, too
  }
}

void launch(StreamHandle* stream, const std::shared_ptr<Communicator>& communicator,
            std::vector<Operation> operations) {
  struct Kernel {
    Kernel(std::shared_ptr<Communicator> used, std::vector<Operation> all)
        : communicator(std::move(used)), operations(std::move(all)) {
      ++communicator->kernels;
    }
    ~Kernel() { --communicator->kernels; }
    Kernel(const Kernel&) = delete;
    Kernel& operator=(const Kernel&) = delete;
    std::shared_ptr<Communicator> communicator;
    std::vector<Operation> operations;
  };
  for (Operation& each : operations) {
    each.from = stream->kernel_address(const_cast<void*>(each.from));
    each.to = stream->kernel_address(each.to);
  }
  const auto run_kernel = [](void* argument) {
    const auto* const kernel = static_cast<const Kernel*>(argument);
    Communicator& used = *kernel->communicator;
    const int what = next_kernel.exchange(0);
    if (what == 2) used.error = Communicator::kRemoteError;
    what == 0 ? static_cast<void>(run(used, kernel->operations)) : wait_for_abort(used);
  };
  ++kernels;
  const auto release = [](void* argument) { delete static_cast<Kernel*>(argument); };
  stream->enqueue(stream, run_kernel, new Kernel(communicator, std::move(operations)), release);
}

int end_group() {
  int code = kSuccess;
  std::vector<Call> calls = std::exchange(grouped, {});
  while (!calls.empty()) {  // a kernel for each communicator and stream
    const Call first = calls.front();
    std::vector<Operation> operations;
    std::erase_if(calls, [&](const Call& call) {
      const bool same = call.handle == first.handle && call.stream == first.stream;
      if (same) operations.push_back(call.operation);
      return same;
    });
    if (first.handle->blocking) {
      launch(first.stream, first.handle->communicator, std::move(operations));
    } else {
      first.handle->launches.push_back(
          [first, operations] { launch(first.stream, first.handle->communicator, operations); });
      first.handle->looks_left = kLooks;
      code = Communicator::kInProgress;
    }
  }
  return code;
}

int add(Handle* handle, void* stream, Operation operation, int type, int op = 0) {
  if (handle == nullptr || stream == nullptr || type < 0 || type >= static_cast<int>(std::size(kTypes))) {
    return kInvalidArgument;
  }
  operation.dtype = kTypes[type];
  if (op < kOwnOps) {
    operation.op = kOps[op];
  } else {
    operation.factor = handle->factors.at(static_cast<size_t>(op - kOwnOps));
  }
  if (handle->state() == Communicator::kInProgress) return kInvalidUsage;
  grouped.push_back({handle, static_cast<StreamHandle*>(stream), operation});
  return depth == 0 ? end_group() : kSuccess;
}

}  // namespace
}  // namespace muster::fake_nccl

using muster::fake_nccl::add;
using muster::fake_nccl::Communicator;
using muster::fake_nccl::Handle;
using muster::fake_nccl::Kind;

extern "C" {

struct UniqueId {
  char bytes[128];
};

int ncclGetVersion(int* version) {
  *version = 22703;
  if (const char* const given = std::getenv("FAKE_NCCL_VERSION")) {
    (void)std::from_chars(given, given + std::strlen(given), *version);
  }
  return 0;
}

void fake_nccl_let_next_kernel(int what) { muster::fake_nccl::next_kernel = what; }
int fake_nccl_kernels() { return muster::fake_nccl::kernels; }
int fake_nccl_aborts() { return muster::fake_nccl::aborts; }

int ncclGetUniqueId(UniqueId* id) {
  uint64_t random = 0;
  muster::fill_secure_random({reinterpret_cast<uint8_t*>(&random), sizeof random});
  *id = {};
  const std::string name = fmt::format("/fake_nccl_{:016x}", random);
  std::memcpy(id->bytes, name.data(), name.size());
  return 0;
}

const char* ncclGetErrorString(int code) {
  if (code == Communicator::kRemoteError) return "remote process exited or there was a network error";
  return code == muster::fake_nccl::kInvalidUsage ? "invalid usage" : "an error";
}
const char* ncclGetLastError(void*) {
  return muster::fake_nccl::failing_rank < 0 ? ""
                                             : "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 31000";
}
void fake_nccl_fail_init(int rank) { muster::fake_nccl::failing_rank = rank; }
void fake_nccl_hang_init(int rank) { muster::fake_nccl::hanging_rank = rank; }

int fake_nccl_roots() { return muster::fake_nccl::roots; }

int ncclCommInitRankConfig(Handle** made, int size, UniqueId id, int rank, muster::fake_nccl::Config* config) {
  const auto communicator = std::make_shared<Communicator>(std::string(id.bytes), size, rank);
  *made = new Handle{.communicator = communicator, .blocking = config->blocking != 0};
  if (rank == muster::fake_nccl::failing_rank) {
    communicator->error = muster::fake_nccl::kInvalidUsage;
    return Communicator::kInProgress;
  }
  if (rank == muster::fake_nccl::hanging_rank) return Communicator::kInProgress;
  std::thread([communicator] { communicator->connect(); }).detach();  // tidy: allow(detach) ends when all have come
  return Communicator::kInProgress;
}

/// The ranks meet only if all have the same ids in the same order.
int ncclCommInitRankScalable(Handle** made, int size, int rank, int roots, UniqueId* ids,
                             muster::fake_nccl::Config* config) {
  muster::fake_nccl::roots = roots;
  UniqueId all{};
  const std::string name = fmt::format(
      "/fake_nccl_{:016x}", muster::fnv1a(std::string_view(ids->bytes, sizeof *ids * static_cast<size_t>(roots))));
  std::memcpy(all.bytes, name.data(), name.size());
  return ncclCommInitRankConfig(made, size, all, rank, config);
}

int ncclCommGetAsyncError(Handle* handle, int* error) {
  *error = handle->state();
  if (handle->looks_left > 0 && --handle->looks_left == 0) {
    for (const auto& each : std::exchange(handle->launches, {})) each();
  }
  return 0;
}
int ncclCommFinalize(Handle*) { return 0; }
int ncclCommDestroy(Handle* handle) {
  muster::fake_nccl::wait_for_kernels(*handle->communicator);
  delete handle;
  return 0;
}
int ncclCommAbort(Handle* handle) {
  ++muster::fake_nccl::aborts;
  handle->communicator->aborted = true;
  return ncclCommDestroy(handle);
}

int ncclGroupStart() {
  ++muster::fake_nccl::depth;
  return 0;
}
int ncclGroupEnd() { return --muster::fake_nccl::depth == 0 ? muster::fake_nccl::end_group() : 0; }

int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, Handle* handle, void* stream) {
  return add(handle, stream, {.kind = Kind::kAllReduce, .from = from, .to = to, .count = count}, type, op);
}
int ncclReduce(const void* from, void* to, size_t count, int type, int op, int root, Handle* handle, void* stream) {
  return add(handle, stream, {.kind = Kind::kReduce, .from = from, .to = to, .count = count, .peer = root}, type, op);
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Handle* handle, void* stream) {
  return add(handle, stream, {.kind = Kind::kBroadcast, .from = from, .to = to, .count = count, .peer = root}, type);
}
int ncclAllGather(const void* from, void* to, size_t count, int type, Handle* handle, void* stream) {
  return add(handle, stream, {.kind = Kind::kAllGather, .from = from, .to = to, .count = count}, type);
}
int ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, Handle* handle, void* stream) {
  return add(handle, stream, {.kind = Kind::kReduceScatter, .from = from, .to = to, .count = count}, type, op);
}
int ncclSend(const void* from, size_t count, int type, int peer, Handle* handle, void* stream) {
  return add(handle, stream, {.kind = Kind::kSend, .from = from, .count = count, .peer = peer}, type);
}
int ncclRecv(void* to, size_t count, int type, int peer, Handle* handle, void* stream) {
  return add(handle, stream, {.kind = Kind::kReceive, .to = to, .count = count, .peer = peer}, type);
}

int ncclRedOpCreatePreMulSum(int* op, void* factor, int type, int /*residence*/, Handle* handle) {
  if (handle->state() == Communicator::kInProgress) return muster::fake_nccl::kInvalidUsage;
  handle->factors.push_back(muster::fake_nccl::value_of(factor, muster::fake_nccl::kTypes[type]));
  *op = muster::fake_nccl::kOwnOps + static_cast<int>(handle->factors.size()) - 1;
  return 0;
}
int ncclRedOpDestroy(int, Handle*) { return 0; }

}  // extern "C"
