#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "muster/base/clock.h"
#include "muster/base/dtype.h"
#include "muster/collective/group_spec.h"
#include "muster/collective/operation.h"
#include "muster/io/connection.h"
#include "muster/store/store.h"

namespace muster {

class Arena;

struct GroupOptions {
  Duration timeout = std::chrono::minutes(5);  ///< of forming, and of each operation that names none
  std::string interface;                       ///< to bind, by name or address; empty: the way to the other ranks
  Credentials credentials;                     ///< empty secret: rank 0 makes one and shares it through the store
  /// Which transports may be used, best first: "shm", "unix", "tcp". MUSTER_TRANSPORT overrides.
  std::string transports = "shm,unix,tcp";
  /// Ranks with different labels are treated as on different hosts, even where they share one (containers that must not
  /// share memory, tests). Ranks with the same are not thereby on one host.
  std::string host_label;
  /// Connections that a link to a rank of another host is made of, 1 to 16, the same at all ranks: more
  /// than one pays where the network gives one connection only a part of what it carries.
  int tcp_streams = 1;
  /// Memory for tensors that the ranks of this host can share (shm/arena.h): collectives move their bytes
  /// once. One may serve all groups of a process; null: the group makes its own. Shared, as tensors outlive groups.
  std::shared_ptr<Arena> arena;
};

/// From the environment: MUSTER_TIMEOUT (seconds), MUSTER_INTERFACE, MUSTER_SECRET, MUSTER_TRANSPORT,
/// MUSTER_HOST_LABEL, MUSTER_TCP_STREAMS, MUSTER_TLS_*.
Result<GroupOptions> group_options_from_environment();

/// One pending result. Copyable; all copies are the same result (hence the shared_ptr inside). Thread-safe.
class Work {
 public:
  /// Finished already, well or with an error.
  explicit Work(Result<>&& result, uint64_t sequence = 0) : sequence_(sequence) {
    if (!result) take_failure(std::move(result));
  }

  bool done() const;
  /// Waits. kTimeout if the deadline comes first (the operation goes on). Without one: the operation's own deadline.
  Result<> wait(const Deadline& deadline) const;
  Result<> wait() const;
  /// The result once done().
  Result<> result() const;
  /// Of a receive that is done: the rank that sent it; else kNoRank.
  Rank source() const;
  /// The group's number for the call, of several the last one's; zero where it has none: a message, or a refused call.
  uint64_t sequence() const { return sequence_; }
  /// Called once, at once if it is done, else on the thread that finishes it.
  void on_done(std::function<void(const Result<>&)> callback) const;

  struct State;
  explicit Work(std::shared_ptr<State> state, uint64_t sequence = 0) : state_(std::move(state)), sequence_(sequence) {}

 private:
  void take_failure(Result<>&& result);

  std::shared_ptr<State> state_;  ///< null: finished well
  uint64_t sequence_ = 0;
};

struct CallOptions {
  Duration timeout = Duration::zero();  ///< zero: the group's
  bool async = false;  ///< false: may run in the caller's thread and return finished; true: returns at once
};

/// What a completion hook is told of an operation that ended.
struct Finished {
  const Call& call;
  TimePoint submitted, started, ended;  ///< on steady_clock()
  const Result<>& result;
};
/// Called by the thread that ran the operation, after its Work is done; it must not wait for the group.
using CompletionHook = std::function<void(const Finished&)>;

/// Ranks plus links: collectives over them. Every rank must call the same operations in the same order; each call takes
/// the next sequence number. Thread-safe: calls run one after the other. Errors name the operation, its number and the
/// rank that failed; after a failure the group is dead (each call returns the first error) and a new one must be
/// formed. Not to be destroyed by a callback of its own Work.
class Group {
 public:
  /// Meets the other ranks through the store; within options.timeout, or an error that names the ranks that did not
  /// come, came twice, or disagree about the size.
  static Result<std::unique_ptr<Group>> form(Store& store, const GroupSpec& membership, const GroupOptions& options);
  virtual ~Group() = default;

  /// Any collective: call.collective, op and root, memory, counts and factor as operation.h says; the rest of the call
  /// is filled in here. The memory is the caller's and must live until the Work is done; the rest of `operation` need
  /// not.
  Work submit(Operation operation, const CallOptions& options = {});
  /// Several at once, done when all are. Those of one kind that follow each other (same dtype, op, root and factor,
  /// equal blocks) run as one operation over all of their memory; all ranks must submit the same list. Nothing is
  /// begun if the arguments of one are wrong.
  Work submit(std::vector<Operation> operations, const CallOptions& options = {});

  /// In place; all ranks end with bit-identical results. `factor`, here and below: of kPremulSum.
  Work all_reduce(BufferView data, ReduceOp op, const CallOptions& options = {}, double factor = 1);
  /// In place at the root; the other ranks' data is only read.
  Work reduce(BufferView data, ReduceOp op, Rank root, const CallOptions& options = {}, double factor = 1);
  Work broadcast(BufferView data, Rank root, const CallOptions& options = {});
  /// `output` is the ranks' inputs by rank; `input` may be the own one of them. With `counts` (elements by rank, the
  /// same everywhere) they may differ in length.
  Work all_gather(BufferView input, BufferView output, const CallOptions& options = {},
                  std::vector<size_t> counts = {});
  /// The same, with an output at the root only.
  Work gather(BufferView input, BufferView output, Rank root, const CallOptions& options = {});
  /// `input`, at the root only, is a block for each rank.
  Work scatter(BufferView input, BufferView output, Rank root, const CallOptions& options = {});
  /// `input` is a block for each rank; `output` becomes the combination of all ranks' blocks for this rank.
  Work reduce_scatter(BufferView input, BufferView output, ReduceOp op, const CallOptions& options = {},
                      std::vector<size_t> counts = {}, double factor = 1);
  /// Block r of `input` goes to rank r; block r of `output` comes from it. With counts they may differ in length, also
  /// be empty.
  Work all_to_all(BufferView input, BufferView output, const CallOptions& options = {},
                  std::vector<size_t> send_counts = {}, std::vector<size_t> receive_counts = {});
  Work barrier(const CallOptions& options = {});

  /// Point to point. Messages of one sender with one tag arrive in order; they are no part of the collectives' order
  /// and take no sequence number. Short messages (32 KiB) are done when they are on their way, longer ones when they
  /// are received. A receive must be as long as the message that it gets (else kMismatch), and ends alone if nothing
  /// comes by its deadline; the group survives both.
  virtual Work send(BufferView data, Rank to, uint32_t tag, const CallOptions& options = {}) = 0;
  /// `from` may be kAnyRank; Work::source() tells who it was.
  virtual Work receive(BufferView data, Rank from, uint32_t tag, const CallOptions& options = {}) = 0;

  /// Ends every pending and later operation here with `why`, and at the peers as far as they can be reached. A rank in
  /// it that is none of the group's blames nobody.
  virtual void abort(Error why) = 0;
  /// Waits a little for what is under way and ends what then still is; the peers learn that this rank has left, as when
  /// the group is destroyed, and later operations fail here. Not to be called by a callback of its own Work.
  virtual void leave() = 0;
  /// The error that killed the group, if one did.
  virtual Result<> status() const = 0;

  /// Waits for what was begun before, and its hooks; so not to be called by one. kTimeout if the deadline comes first;
  /// failed operations count as ended.
  virtual Result<> wait_for_pending(const Deadline& deadline) = 0;
  /// Replaces the hook; null for none. It is not called for what ended before, and called in the order of operations.
  virtual void on_completion(CompletionHook hook) = 0;
  /// Of each later operation that names none. kInvalidArgument unless it is greater than zero.
  virtual Result<> set_timeout(Duration timeout) = 0;
  virtual Duration timeout() const = 0;
  /// What it was formed with.
  virtual const GroupOptions& options() const = 0;
  virtual const GroupSpec& membership() const = 0;

  // Groups made of this one meet through `store`, under keys of their own. They take over its options and timeout, and
  // live on without it. Each group that is made of one parent needs another `name`.

  /// The ranks named, which become 0, 1, ... in that order; all of them must call alike. Nothing for the others, who
  /// may call or not. kInvalidArgument for a rank that is no member or named twice.
  Result<std::unique_ptr<Group>> split(Store& store, const std::vector<Rank>& ranks, const std::string& name);
  /// One group for each color >= 0, of those who gave it, ordered by key, then rank; nothing for a negative color. All
  /// ranks must call.
  Result<std::unique_ptr<Group>> split(Store& store, int color, int key, const std::string& name);
  /// A group of ranks from several groups: all members of `membership` must call.
  Result<std::unique_ptr<Group>> merge(Store& store, const GroupSpec& membership);
  /// The ranks without `excluded`, in their order. Only they call, all with the same list; this group may have failed,
  /// and those excluded may be dead. With `abort_first`, whatever runs here is ended first; else waited for.
  Result<std::unique_ptr<Group>> shrink(Store& store, const std::vector<Rank>& excluded, bool abort_first);

  /// A barrier that finds out who is missing: the error of rank 0 names every rank that did not come (the first only,
  /// unless `name_all`), as torch's does, and the group lives on. Goes through the store, so it works beside calls
  /// that hang, and after a failure.
  Result<> monitored_barrier(Store& store, Duration timeout, bool name_all);

  /// Operations begun so far.
  virtual uint64_t sequence() const = 0;
  /// "shm" when all ranks share this host's memory, else the kinds of links to the others ("shm+tcp"), made yet
  /// or not.
  virtual std::string transport() const = 0;
  /// For tensors that collectives reduce and copy where they lie. Null where this rank shares no memory with others.
  /// After a failed reduce or all_reduce of such tensors, a rank of this host that was stopped in the middle of it, and
  /// not killed, may once it goes on write the one piece that it had begun, up to 8 KiB of each: kill it before memory
  /// of the arena that took part is used again.
  virtual std::shared_ptr<Arena> arena() const = 0;

 protected:
  /// Begins an operation whose arguments are right.
  virtual Work begin(Operation&& operation, const CallOptions& options) = 0;

 private:
  /// The same for any operation.
  Work check_and_begin(Operation&& operation, const CallOptions& options);

  std::atomic<uint64_t> monitored_ = 0, shrunk_ = 0;  ///< calls so far: every rank must make as many
};

}  // namespace muster
