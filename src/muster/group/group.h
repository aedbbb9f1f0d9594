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
  /// Ranks with different labels count as ranks of different hosts, also on one host (containers that must not share
  /// memory, tests). Equal labels do not put ranks on one host.
  std::string host_label;
  /// Connections that a link to a rank of another host consists of, 1 to 16, the same at all ranks. More than one pays
  /// if the network limits the rate of a single connection.
  int tcp_streams = 1;
  /// Memory for tensors that the ranks of this host can share (shm/arena.h): collectives move their bytes once. One
  /// arena may serve all groups of a process. Null: the group makes its own. Shared, because tensors outlive groups.
  std::shared_ptr<Arena> arena;
};

/// From the environment: MUSTER_TIMEOUT (seconds), MUSTER_INTERFACE, MUSTER_SECRET, MUSTER_TRANSPORT,
/// MUSTER_HOST_LABEL, MUSTER_TCP_STREAMS, MUSTER_TLS_*.
Result<GroupOptions> group_options_from_environment();

/// One pending result. All copies refer to the same result. Thread-safe.
class Work {
 public:
  /// Finished already, with success or an error.
  explicit Work(Result<>&& result, uint64_t sequence = 0) : sequence_(sequence) {
    if (!result) take_failure(std::move(result));
  }

  bool done() const;
  /// Waits for the result. kTimeout if the deadline comes first; the operation then goes on. Without a deadline it
  /// waits until the operation's own deadline.
  Result<> wait(const Deadline& deadline) const;
  Result<> wait() const;
  /// The result once done().
  Result<> result() const;
  /// The rank that sent the message of a receive that is done; else kNoRank.
  Rank source() const;
  /// The group's sequence number of the call; of the last one if they are several. Zero for messages and refused calls.
  uint64_t sequence() const { return sequence_; }
  /// Calls `callback` once: now if the work is done, else on the thread that finishes it.
  void on_done(std::function<void(const Result<>&)> callback) const;

  struct State;
  explicit Work(std::shared_ptr<State> state, uint64_t sequence = 0) : state_(std::move(state)), sequence_(sequence) {}

 private:
  void take_failure(Result<>&& result);

  std::shared_ptr<State> state_;  ///< null: finished with success
  uint64_t sequence_ = 0;
};

struct CallOptions {
  Duration timeout = Duration::zero();  ///< zero: the group's
  bool async = false;  ///< false: may run in the caller's thread and return finished; true: returns at once
};

/// The argument of a completion hook: an operation that has ended.
struct Finished {
  const Call& call;
  TimePoint submitted, started, ended;  ///< on steady_clock()
  const Result<>& result;
};
/// Called by the thread that ran the operation, after its Work is done; it must not wait for the group.
using CompletionHook = std::function<void(const Finished&)>;

/// A group of ranks that run collectives and exchange messages. Every rank must call the same collectives in the same
/// order; each call takes the next sequence number. Thread-safe: calls run one after the other. Errors name the
/// operation, its number and the rank that failed. After a failure every call returns the first error, and a new group
/// must be formed. Must not be destroyed from a completion callback of its own Work.
class Group {
 public:
  /// Meets the other ranks through the store, within options.timeout. The error names ranks that did not come, that
  /// came twice, or that have another size.
  static Result<std::unique_ptr<Group>> form(Store& store, const GroupSpec& membership, const GroupOptions& options);
  virtual ~Group() = default;

  /// Any collective, by its call.collective, op and root, and memory, counts and factor as in operation.h; the other
  /// fields are filled in. The memory must live until the Work is done.
  Work submit(Operation operation, const CallOptions& options = {});
  /// Several collectives; the Work is done when all are. Consecutive operations of one kind (same dtype, op, root and
  /// factor, equal blocks) run as one. All ranks must submit the same list. Nothing begins if one has invalid
  /// arguments.
  Work submit(std::vector<Operation> operations, const CallOptions& options = {});

  /// In place. All ranks get bit-identical results. `factor`, here and below, is for kPremulSum.
  Work all_reduce(BufferView data, ReduceOp op, const CallOptions& options = {}, double factor = 1);
  /// In place at the root; the data of other ranks is only read.
  Work reduce(BufferView data, ReduceOp op, Rank root, const CallOptions& options = {}, double factor = 1);
  Work broadcast(BufferView data, Rank root, const CallOptions& options = {});
  /// `output` receives the inputs of all ranks, by rank; `input` may be this rank's block of it. With `counts`
  /// (elements by rank, the same at all ranks) the blocks may differ in length.
  Work all_gather(BufferView input, BufferView output, const CallOptions& options = {},
                  std::vector<size_t> counts = {});
  /// Like all_gather, with an output at the root only.
  Work gather(BufferView input, BufferView output, Rank root, const CallOptions& options = {});
  /// `input` is given at the root only: one block for each rank.
  Work scatter(BufferView input, BufferView output, Rank root, const CallOptions& options = {});
  /// `input` has one block for each rank; `output` becomes the reduction of all ranks' blocks for this rank.
  Work reduce_scatter(BufferView input, BufferView output, ReduceOp op, const CallOptions& options = {},
                      std::vector<size_t> counts = {}, double factor = 1);
  /// Block r of `input` goes to rank r; block r of `output` comes from rank r. With counts the blocks may differ in
  /// length and be empty.
  Work all_to_all(BufferView input, BufferView output, const CallOptions& options = {},
                  std::vector<size_t> send_counts = {}, std::vector<size_t> receive_counts = {});
  Work barrier(const CallOptions& options = {});

  /// Point-to-point messages. Messages of one sender with one tag arrive in order. They have no order with collectives
  /// and no sequence number. The send of a short message (32 KiB) is done when the message is on its way, the send of a
  /// longer one when it is received. A receive must be as long as its message, else it fails with kMismatch. A receive
  /// that gets nothing by its deadline fails with kTimeout. The group survives both.
  virtual Work send(BufferView data, Rank to, uint32_t tag, const CallOptions& options = {}) = 0;
  /// `from` may be kAnyRank; Work::source() is then the sender.
  virtual Work receive(BufferView data, Rank from, uint32_t tag, const CallOptions& options = {}) = 0;

  /// Ends every pending and later operation with `why`, here and at the peers that can be reached. A rank in it that is
  /// not of this group is ignored.
  virtual void abort(Error why) = 0;
  /// Waits a short time for pending operations, ends the others, and tells the peers that this rank has left. Later
  /// operations fail. The destructor does the same. Must not be called from a completion callback of its own Work.
  virtual void leave() = 0;
  /// The error that killed the group, if one did.
  virtual Result<> status() const = 0;

  /// Waits for all operations begun before, and for their hooks; so a hook must not call it. kTimeout if the deadline
  /// comes first. Failed operations count as ended.
  virtual Result<> wait_for_pending(const Deadline& deadline) = 0;
  /// Replaces the hook; null for none. It is called for operations that are submitted later, in their order.
  virtual void on_completion(CompletionHook hook) = 0;
  /// The timeout of each later operation that has none of its own. kInvalidArgument unless it is greater than zero.
  virtual Result<> set_timeout(Duration timeout) = 0;
  virtual Duration timeout() const = 0;
  /// The options with which it was formed.
  virtual const GroupOptions& options() const = 0;
  virtual const GroupSpec& membership() const = 0;

  // New groups of ranks of this one. Their ranks meet through `store`, under keys of their own. They inherit its
  // options and timeout, and may outlive it. Each group that is made of one parent needs another `name`.

  /// A group of `ranks`, which become 0, 1, ... in that order. All of them must call with the same list; other ranks
  /// may call and get null. kInvalidArgument for a rank that is not a member or that is named twice.
  Result<std::unique_ptr<Group>> split(Store& store, const std::vector<Rank>& ranks, const std::string& name);
  /// One group for each color >= 0: the ranks that gave it, ordered by key, then by rank. Null for a negative color.
  /// All ranks must call.
  Result<std::unique_ptr<Group>> split(Store& store, int color, int key, const std::string& name);
  /// A group of ranks from several groups. All its ranks must call.
  Result<std::unique_ptr<Group>> merge(Store& store, const GroupSpec& membership);
  /// A group of the ranks that are not in `excluded`, in the same order. Only these ranks call, all with the same list.
  /// This group may have failed, and the excluded ranks may be dead. Pending operations are aborted with `abort_first`,
  /// else waited for.
  Result<std::unique_ptr<Group>> shrink(Store& store, const std::vector<Rank>& excluded, bool abort_first);

  /// A barrier that reports missing ranks: the error of rank 0 names the first rank that did not come, or all with
  /// `name_all`, as torch's does. The group survives. It uses the store, so it works while collectives hang, and after
  /// a failure.
  Result<> monitored_barrier(Store& store, Duration timeout, bool name_all);

  /// Operations begun so far.
  virtual uint64_t sequence() const = 0;
  /// "shm" if all ranks share this host's memory, else the kinds of links to the others ("shm+tcp"), connected yet or
  /// not.
  virtual std::string transport() const = 0;
  /// Memory for tensors that collectives read and write in place. Null if this rank shares no memory with others.
  /// After a failed reduce or all_reduce of such tensors, a rank that was stopped by a signal in the middle of it may,
  /// when it continues, still write the piece that it had begun, up to 8 KiB of each tensor. Kill such a rank before
  /// the tensors' memory is used again.
  virtual std::shared_ptr<Arena> arena() const = 0;

 protected:
  /// Begins an operation whose arguments are valid.
  virtual Work begin(Operation&& operation, const CallOptions& options) = 0;

 private:
  Work validate_and_begin(Operation&& operation, const CallOptions& options);

  std::atomic<uint64_t> monitored_ = 0, shrunk_ = 0;  ///< calls so far; the same at every rank
};

}  // namespace muster
