#include "muster/nccl/communicator.h"

#include <fmt/format.h>

#include <thread>
#include <utility>

namespace muster::nccl {
namespace {

/// A wait for NCCL yields its core for so long, and then sleeps between two looks.
constexpr Duration kYieldTime = 200us, kPoll = 100us;
/// How long the destructor waits.
constexpr Duration kFinalizeTime = 5s;

}  // namespace

Result<std::unique_ptr<Communicator>> Communicator::form(const Library& library, Group& host,
                                                         const Deadline& deadline) {
  const GroupSpec& self = host.membership();
  const CallOptions limited{.timeout = deadline.left()};
  // The first byte says whether rank 0 has an id, so that its failure is not a hang of the others.
  struct Offer {
    uint8_t valid = 0;
    UniqueId id{};
  } offer;
  Result<> made;
  if (self.rank == 0) {
    made = library.check(library.GetUniqueId(&offer.id), "ncclGetUniqueId");
    offer.valid = made ? 1 : 0;
  }
  MUSTER_TRY(host.broadcast({&offer, sizeof offer, Dtype::kUint8}, 0, limited).wait());
  MUSTER_TRY(made);
  if (offer.valid == 0) return fail(ErrorCode::kUnavailable, "rank 0 could not begin a communicator of NCCL", 0);
  Config config;
  config.blocking = 0;
  Comm handle = nullptr;
  const int code = library.CommInitRankConfig(&handle, self.size, offer.id, self.rank, &config);
  MUSTER_TRY(library.check(code, "ncclCommInitRankConfig"));
  auto communicator = std::unique_ptr<Communicator>(new Communicator(library, handle));
  Lock lock(communicator->mutex_);
  Result<> formed = communicator->wait_until_ready(lock, "ncclCommInitRankConfig", deadline);
  lock.unlock();
  if (!formed) {
    communicator->abort();
    return tl::unexpected(formed.error());
  }
  return communicator;
}

Communicator::~Communicator() {
  Lock lock(mutex_);
  if (aborted_) return;
  const bool ended = library.check(library.CommFinalize(handle_), "ncclCommFinalize") &&
                     wait_until_ready(lock, "ncclCommFinalize", Deadline::after(kFinalizeTime));
  aborted_ = true;
  (void)(ended ? library.CommDestroy(handle_) : library.CommAbort(handle_));
}

Result<Communicator::Lock> Communicator::lock() {
  Lock lock(mutex_);
  if (aborted_) return fail(ErrorCode::kAborted, "the communicator of NCCL was aborted");
  return lock;
}

Result<> Communicator::wait_until_ready(Lock& lock, const char* call, const Deadline& deadline) const {
  const Deadline sleeps = Deadline::after(kYieldTime);
  for (;;) {
    if (aborted_) return fail(ErrorCode::kAborted, fmt::format("{} was aborted", call));
    int code = kSuccess;
    MUSTER_TRY(library.check(library.CommGetAsyncError(handle_, &code), "ncclCommGetAsyncError", handle_));
    if (code != kInProgress) return library.check(code, call, handle_);
    if (deadline.passed()) return fail(ErrorCode::kTimeout, fmt::format("{} has not ended in time", call));
    lock.unlock();
    if (sleeps.passed()) {
      std::this_thread::sleep_for(kPoll);  // tidy: allow(sleep) NCCL has no event for this
    } else {
      std::this_thread::yield();
    }
    lock.lock();
  }
}

Result<> Communicator::status() {
  MUSTER_ASSIGN(const Lock held, lock());
  int code = kSuccess;
  MUSTER_TRY(library.check(library.CommGetAsyncError(handle_, &code), "ncclCommGetAsyncError", handle_));
  return library.check(code, "a collective of NCCL", handle_);
}

void Communicator::abort() {
  const Lock lock(mutex_);
  if (!std::exchange(aborted_, true)) (void)library.CommAbort(handle_);
}

}  // namespace muster::nccl
