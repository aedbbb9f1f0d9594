#pragma once

#include <functional>
#include <memory>
#include <string>

#include "muster/base/clock.h"
#include "muster/base/dtype.h"
#include "muster/io/connection.h"
#include "muster/store/store.h"

namespace muster {

/// Who takes part. Equal at all ranks but for `rank`.
struct Membership {
  Rank rank = 0;
  int size = 1;
  std::string name = "default";
  uint64_t generation = 0;  ///< of the job: a restarted job's ranks never meet those of the dead generation
};

struct GroupOptions {
  Duration timeout = std::chrono::minutes(5);  ///< of forming, and of each operation that names none
  std::string interface;                       ///< to bind, by name or address; empty: the way to the other ranks
  Credentials credentials;                     ///< empty secret: rank 0 makes one and shares it through the store
  /// Which transports may be used, best first: "shm", "unix", "tcp". MUSTER_TRANSPORT overrides.
  std::string transports = "shm,unix,tcp";
};

/// From the environment: MUSTER_TIMEOUT (seconds), MUSTER_INTERFACE, MUSTER_SECRET, MUSTER_TRANSPORT, MUSTER_TLS_*.
Result<GroupOptions> group_options_from_environment();

/// One pending result. Copyable; all copies are the same result (hence the shared_ptr inside). Thread-safe.
class Work {
 public:
  /// Finished already, well or with an error.
  explicit Work(Result<> result);

  bool done() const;
  /// Waits. kTimeout if the deadline comes first (the operation goes on). Without one: the operation's own deadline.
  Result<> wait(const Deadline& deadline) const;
  Result<> wait() const;
  /// The result once done().
  Result<> result() const;
  /// Called once, at once if it is done, else on the thread that finishes it.
  void on_done(std::function<void(const Result<>&)> callback) const;

  struct State;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<State> state_;
};

struct CallOptions {
  Duration timeout = Duration::zero();  ///< zero: the group's
  bool async = false;  ///< false: may run in the caller's thread and return finished; true: returns at once
};

/// `count` elements of `dtype`. The memory is the caller's and must live until the Work is done.
struct BufferView {
  void* data = nullptr;
  size_t count = 0;
  Dtype dtype = Dtype::kUint8;
  size_t bytes() const { return count * size_of(dtype); }
};

/// Ranks plus links: collectives over them. Every rank must call the same operations in the same order; each call takes
/// the next sequence number. Thread-safe: calls are ordered by a lock. Errors name the operation, its number and the
/// rank that failed; after a failure the group is dead (each call returns the first error) and a new one must be
/// formed. Not to be destroyed by a callback of its own Work.
class Group {
 public:
  /// Meets the other ranks through the store and links up with all of them; within options.timeout, or an error that
  /// names the ranks that did not come, came twice, or disagree about the size.
  static Result<std::unique_ptr<Group>> form(Store& store, const Membership& membership, const GroupOptions& options);
  virtual ~Group() = default;

  /// In place; all ranks end with bit-identical results.
  virtual Work all_reduce(BufferView data, ReduceOp op, const CallOptions& options = {}) = 0;
  virtual Work broadcast(BufferView data, Rank root, const CallOptions& options = {}) = 0;
  /// `output` holds size * input.bytes(): rank r's input at r * input.bytes(). Input may be its own slot of output.
  virtual Work all_gather(BufferView input, void* output, const CallOptions& options = {}) = 0;
  virtual Work barrier(const CallOptions& options = {}) = 0;

  /// Ends every pending and later operation here with `why`, and at the peers as far as they can be reached.
  virtual void abort(Error why) = 0;
  /// The error that killed the group, if one did.
  virtual Result<> status() const = 0;

  virtual const Membership& membership() const = 0;
  /// Operations begun so far.
  virtual uint64_t sequence() const = 0;
  /// "shm" when all ranks share this host's memory, else the kinds of links in use ("shm+tcp").
  virtual std::string transport() const = 0;
};

}  // namespace muster
