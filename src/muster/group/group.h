#pragma once

#include <functional>
#include <memory>
#include <string>

#include "muster/base/clock.h"
#include "muster/base/dtype.h"
#include "muster/collective/operation.h"
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
  /// Of a receive that is done: the rank that sent it; else kNoRank.
  Rank source() const;
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

inline constexpr Rank kAnyRank = -2;  ///< receive(): from whoever sends

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

  /// Any collective. What `operation` says lies where is what the functions below ask for. The memory is the caller's
  /// and must live until the Work is done; the rest of `operation` need not. call.count, layout and sequence are filled
  /// in here.
  virtual Work submit(Operation operation, const CallOptions& options = {}) = 0;

  /// In place; all ranks end with bit-identical results.
  Work all_reduce(BufferView data, ReduceOp op, const CallOptions& options = {});
  /// In place at the root; the other ranks' data is only read.
  Work reduce(BufferView data, ReduceOp op, Rank root, const CallOptions& options = {});
  Work broadcast(BufferView data, Rank root, const CallOptions& options = {});
  /// `output` is the ranks' inputs by rank; `input` may be the own one of them. With `counts` (elements by rank, the
  /// same everywhere) they may differ in length.
  Work all_gather(BufferView input, BufferView output, const CallOptions& options = {},
                  std::vector<size_t> counts = {});
  /// The same, with an output at the root only.
  Work gather(BufferView input, BufferView output, Rank root, const CallOptions& options = {});
  /// `input`, at the root only, is a block for each rank.
  Work scatter(BufferView input, BufferView output, Rank root, const CallOptions& options = {});
  /// `input` is a block for each rank; `output` becomes the combination of all ranks' blocks for this rank, bit for bit
  /// what all_reduce gives there.
  Work reduce_scatter(BufferView input, BufferView output, ReduceOp op, const CallOptions& options = {},
                      std::vector<size_t> counts = {});
  /// Block r of `input` goes to rank r; block r of `output` comes from it. With counts they may differ in length, also
  /// be empty.
  Work all_to_all(BufferView input, BufferView output, const CallOptions& options = {},
                  std::vector<size_t> send_counts = {}, std::vector<size_t> receive_counts = {});
  Work barrier(const CallOptions& options = {});

  /// Point to point. Messages of one sender with one tag arrive in order; they are no part of the collectives' order
  /// and take no sequence number. A receive must be as long as the message that it gets. Done when the memory may be
  /// used again.
  virtual Work send(BufferView data, Rank to, uint32_t tag, const CallOptions& options = {}) = 0;
  /// `from` may be kAnyRank; Work::source() tells who it was.
  virtual Work receive(BufferView data, Rank from, uint32_t tag, const CallOptions& options = {}) = 0;

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
