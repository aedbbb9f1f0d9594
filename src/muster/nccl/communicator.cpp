#include "muster/nccl/communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <future>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace muster::nccl {
namespace {

/// A wait for NCCL yields its core for so long, and then sleeps between two looks.
constexpr Duration kYieldTime = 200us, kPoll = 100us;
/// How often a rank looks for a failure of another one while the communicator forms.
constexpr Duration kFormingPoll = 10ms;
/// How long the destructor waits for pending operations, and how long NCCL may take to free a communicator.
constexpr Duration kFinalizeTime = 5s, kReleaseTime = 2s;
constexpr const char* kInit = "the start of a communicator of NCCL";

/// Adds what is usually wrong.
Error with_hint(Error error, const Library& library) {
  error.message += fmt::format(
      "; each rank needs a GPU of its own, as its current device (torch.cuda.set_device(LOCAL_RANK)), and a library "
      "that "
      "fits torch's CUDA (this is {})",
      library.version());
  return error;
}

/// Makes NCCL's ids at so many ranks, and gives them to all. There is one id if a rank's NCCL knows only one root.
Result<std::vector<UniqueId>> exchange_ids(const Library& library, Group& host, const Deadline& deadline, int roots) {
  // `valid` says whether a root has an id, so that its failure is not a hang of the others.
  struct Offer {
    uint8_t scales = 0, valid = 0;
    UniqueId id{};
  };
  const auto [rank, size, name, generation] = host.membership();
  const auto root = [&, size = size](int index) { return static_cast<Rank>(int64_t{index} * size / roots); };
  Offer mine{.scales = library.CommInitRankScalable != nullptr};
  Result<> made;
  for (int index = 0; index < roots; ++index) {
    if (rank != root(index)) continue;
    made = library.check(library.GetUniqueId(&mine.id), "ncclGetUniqueId");
    mine.valid = made ? 1 : 0;
  }
  std::vector<Offer> offers(static_cast<size_t>(size));
  MUSTER_TRY(host.all_gather({&mine, sizeof mine, Dtype::kUint8},
                             {offers.data(), offers.size() * sizeof(Offer), Dtype::kUint8},
                             {.timeout = deadline.left()})
                 .wait());
  MUSTER_TRY(made);
  if (!std::ranges::all_of(offers, [](const Offer& each) { return each.scales != 0; })) roots = 1;
  std::vector<UniqueId> ids;
  for (int index = 0; index < roots; ++index) {
    const Offer& offer = offers[static_cast<size_t>(root(index))];
    if (offer.valid == 0) {
      return fail(ErrorCode::kUnavailable, fmt::format("rank {} could not begin a communicator of NCCL", root(index)),
                  root(index));
    }
    ids.push_back(offer.id);
  }
  return ids;
}

}  // namespace

Result<std::unique_ptr<Communicator>> Communicator::form(const Library& library, std::shared_ptr<Device> device,
                                                         Group& host,
                                                         const std::function<std::optional<Error>()>& failed,
                                                         const Deadline& deadline, int ranks_per_root) {
  const auto [rank, size, name, generation] = host.membership();
  MUSTER_ASSIGN(auto ids, exchange_ids(library, host, deadline, (size + ranks_per_root - 1) / ranks_per_root));
  Config config;
  config.blocking = 0;
  const auto handle = std::make_shared<Comm>(nullptr);
  const int roots = static_cast<int>(ids.size());
  const int code = roots == 1 ? library.CommInitRankConfig(handle.get(), size, ids[0], rank, &config)
                              : library.CommInitRankScalable(handle.get(), size, rank, roots, ids.data(), &config);
  if (const Result<> begun = library.check(code, kInit); !begun) {
    return tl::unexpected(with_hint(begun.error(), library));
  }
  auto communicator = std::unique_ptr<Communicator>(new Communicator(library, std::move(device), handle));
  Lock lock(communicator->mutex_);
  for (;;) {
    const Result<> formed =
        communicator->wait_until_ready(lock, kInit, Deadline::after(kFormingPoll).or_sooner(deadline.when()));
    if (formed) break;
    const bool waits = formed.error().code == ErrorCode::kTimeout && !deadline.passed();
    const std::optional<Error> why = waits ? failed() : with_hint(formed.error(), library);
    if (!why) continue;
    lock.unlock();
    communicator->abort();
    return tl::unexpected(*why);
  }
  lock.unlock();
  return communicator;
}

Communicator::~Communicator() {
  Lock lock(mutex_);
  if (aborted_) return;
  const bool ended = library.check(library.CommFinalize(handle_), "ncclCommFinalize") &&
                     wait_until_ready(lock, "ncclCommFinalize", Deadline::after(kFinalizeTime));
  aborted_ = true;
  release(ended ? library.CommDestroy : library.CommAbort);
}

void Communicator::release(int (*function)(Comm)) const {
  std::promise<void> released;
  std::future<void> done = released.get_future();
  try {
    // tidy: allow(detach) a graph may keep the communicator for long
    std::thread([function, device = device_, written = written_, handle = handle_,
                 ended = std::move(released)]() mutable {
      device->make_current();  // NCCL restores the current device, and that makes a context on it
      (void)function(handle);
      ended.set_value();
    }).detach();
    (void)done.wait_for(std::chrono::nanoseconds(kReleaseTime));
  } catch (const std::system_error&) {  // no thread
    (void)function(handle_);
  }
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
  if (!std::exchange(aborted_, true)) release(library.CommAbort);
}

}  // namespace muster::nccl
