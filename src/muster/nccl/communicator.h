#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "muster/group/group.h"
#include "muster/nccl/device.h"
#include "muster/nccl/library.h"

namespace muster::nccl {

/// A communicator of NCCL among the ranks of a group. Each call has a deadline. Thread-safe: a thread that calls NCCL
/// with the handle has the lock, so that abort(), which frees the handle, comes before or after.
class Communicator {
 public:
  using Lock = std::unique_lock<std::mutex>;

  /// A root makes one of NCCL's unique ids, and has a thread that tells its ranks their neighbours. A communicator with
  /// more ranks than this has several roots, if NCCL knows more than one. torch has the same limit.
  static constexpr int kRanksPerRoot = 128;

  /// Collective over `host`, which carries the ids: no message goes to the store. The error names what NCCL says, or
  /// that it did not end by the deadline. Ends earlier if `failed`, called again and again, returns an error.
  static Result<std::unique_ptr<Communicator>> form(const Library& library, std::shared_ptr<Device> device, Group& host,
                                                    const std::function<std::optional<Error>()>& failed,
                                                    const Deadline& deadline, int ranks_per_root = kRanksPerRoot);
  /// Ends what is pending. NCCL frees a communicator after the last graph that has captured calls of it. So this and
  /// abort() wait a few seconds for that, and then a thread goes on.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const Library& library;
  Comm handle() const { return handle_; }
  /// kAborted after abort().
  Result<Lock> lock();
  /// Waits until NCCL has taken the last call. Releases the lock while it waits. `call` is in the error.
  Result<> wait_until_ready(Lock& lock, const char* call, const Deadline& deadline) const;
  /// The error of a kernel or of the network.
  Result<> status();
  /// Ends the kernels that are pending. No other call may follow.
  void abort();

 private:
  Communicator(const Library& from, std::shared_ptr<Device> device, std::shared_ptr<Comm> written)
      : library(from), device_(std::move(device)), written_(std::move(written)), handle_(*written_) {}
  void release(int (*function)(Comm)) const;

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Comm> written_;  ///< NCCL writes the handle there again when its start has ended
  const Comm handle_;
  std::mutex mutex_;
  bool aborted_ = false;  ///< guarded by mutex_
};

}  // namespace muster::nccl
