#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
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
  Duration timeout = std::chrono::minutes(5);  ///< of forming, and of each operation that has no timeout of its own
  std::string interface;                       ///< to bind, by name or address; empty: io/outward_address.h chooses
  Credentials credentials;                     ///< empty secret: rank 0 generates one and shares it through the store
  /// Which transports may be used, best first: "shm", "unix", "tcp". MUSTER_TRANSPORT overrides.
  std::string transports = "shm,unix,tcp";
  /// Ranks of one host that have different labels are treated as ranks of different hosts. Useful for tests, and for
  /// containers that must not share memory. Equal labels do not put ranks on one host.
  std::string host_label;
  /// Number of connections in each TCP link, 1 to 16, the same at all ranks. Several connections are faster if the
  /// network limits the rate of a single connection.
  int tcp_streams = 1;
  /// Memory for tensors that the ranks of this host share (shm/arena.h), so that collectives move each byte once. One
  /// arena may serve all groups of a process. Null: the group creates its own arena. A shared_ptr, because tensors may
  /// outlive the group.
  std::shared_ptr<Arena> arena;
};

/// Reads the environment: MUSTER_TIMEOUT (seconds), MUSTER_INTERFACE, MUSTER_SECRET, MUSTER_TRANSPORT,
/// MUSTER_HOST_LABEL, MUSTER_TCP_STREAMS, MUSTER_TLS_*.
Result<GroupOptions> group_options_from_environment();

/// One pending result. All copies refer to the same result. Thread-safe.
class Work {
 public:
  /// A Work that is finished already, with success or an error.
  explicit Work(Result<>&& result, uint64_t sequence = 0) : sequence_(sequence) {
    if (!result) take_failure(std::move(result));
  }

  bool done() const;
  /// Waits for the result. This thread may run the operation and its callbacks meanwhile. Returns kTimeout if the
  /// deadline passes first; the operation then continues. Without a deadline it waits until the operation's own
  /// deadline.
  Result<> wait(const Deadline& deadline) const;
  Result<> wait() const;
  /// The result. Only valid if done().
  Result<> result() const;
  /// For a receive that is done, the rank that sent the message. Otherwise kNoRank.
  Rank source() const;
  /// The group's sequence number of the call, or of the last call if there are several. Zero for messages and for calls
  /// that were refused.
  uint64_t sequence() const { return sequence_; }
  /// Calls `callback` once: at once if the work is done, else later on the thread that finishes the work.
  void on_done(std::function<void(const Result<>&)> callback) const;

  struct State;
  explicit Work(std::shared_ptr<State> state, uint64_t sequence = 0) : state_(std::move(state)), sequence_(sequence) {}

 private:
  void take_failure(Result<>&& result);

  std::shared_ptr<State> state_;  ///< null: finished with success
  uint64_t sequence_ = 0;
};

struct CallOptions {
  Duration timeout = Duration::zero();  ///< zero: the group's timeout
  bool async = false;  ///< false: may run in the caller's thread and return finished; true: returns at once
};

/// A message of Group::exchange().
struct Message {
  BufferView data;
  Rank peer = 0;
  uint32_t tag = 0;
  bool send = true;
};

/// The argument of a completion hook: an operation that has ended.
struct Finished {
  const Call& call;
  TimePoint submitted, started, ended;  ///< on steady_clock()
  const Result<>& result;
};
/// Called by the thread that ran the operation, after its Work is done. The hook must not wait for the group.
using CompletionHook = std::function<void(const Finished&)>;

/// A group of ranks that run collectives and exchange messages. Every rank must call the same collectives in the same
/// order; each call takes the next sequence number. Thread-safe: calls run one after the other. Errors name the
/// operation, its number and the rank that failed. After a failure every call returns the first error, and a new group
/// must be formed. Must not be destroyed from a completion callback of its own Work.
class Group {
 public:
  /// Exchanges addresses with the other ranks through the store and connects to them, within options.timeout. The error
  /// names ranks that did not come, a rank that two processes claim, or a rank that has another world size.
  static Result<std::unique_ptr<Group>> form(Store& store, const GroupSpec& membership, const GroupOptions& options);
  /// Forms the group of all ranks of the job, from RANK, WORLD_SIZE and what group_options_from_environment() and
  /// store_from_environment() read: `muster run` sets them. In a job without MUSTER_STORE, rank 0 serves the store at
  /// MASTER_ADDR:MASTER_PORT as long as it has the group. kInvalidArgument names a variable that is missing. The result
  /// is shared, because it also holds the store.
  static Result<std::shared_ptr<Group>> join_job();
  /// The store in which join_job() forms the group, over a connection of its own: for split(), and for keys of the
  /// program.
  static Result<std::unique_ptr<Store>> job_store();
  virtual ~Group() = default;

  /// Submits any collective. The caller sets call.collective, call.op and call.root, and the memory, counts and factor
  /// as operation.h describes. Other fields are filled in. The memory must live until the Work is done.
  Work submit(Operation operation, const CallOptions& options = {});
  /// Submits several collectives. The Work is done when all of them are done. Consecutive operations of one kind (same
  /// dtype, op, root and factor, equal blocks) run as one operation. All ranks must submit the same list. If one
  /// operation has invalid arguments, no operation begins.
  Work submit(std::vector<Operation> operations, const CallOptions& options = {});

  /// In place. All ranks get bit-identical results. In this function and the ones below, `factor` is for kPremulSum.
  Work all_reduce(BufferView data, ReduceOp op, const CallOptions& options = {}, double factor = 1);
  /// In place at the root. The data of other ranks does not change.
  Work reduce(BufferView data, ReduceOp op, Rank root, const CallOptions& options = {}, double factor = 1);
  Work broadcast(BufferView data, Rank root, const CallOptions& options = {});
  /// `output` receives the inputs of all ranks, in the order of ranks. `input` may be this rank's block of `output`.
  /// With `counts` (elements by rank, the same at all ranks) the blocks may differ in length.
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

  /// Point-to-point messages. Messages of one sender with one tag arrive in order. Messages are not ordered with
  /// collectives, and they have no sequence number. The send of a short message (up to 32 KiB) is done when the message
  /// is on its way. The send of a longer message is done when the message is received. A receive must be as long as its
  /// message, else it fails with kMismatch. A receive that gets no message before its deadline fails with kTimeout. The
  /// group stays usable after both errors.
  virtual Work send(BufferView data, Rank to, uint32_t tag, const CallOptions& options = {}) = 0;
  /// `from` may be kAnyRank. Work::source() then returns the sender.
  virtual Work receive(BufferView data, Rank from, uint32_t tag, const CallOptions& options = {}) = 0;

  /// Begins several messages, none of which waits for another: ranks may send to each other and receive at once.
  /// All are done when all returned Works are done.
  virtual std::vector<Work> exchange(std::vector<Message> messages, const CallOptions& options = {});

  /// Ends every pending and later operation with `why`, at this rank and at the peers that can be reached. `why.rank`
  /// is ignored if it is not a rank of this group.
  virtual void abort(Error why) = 0;
  /// Waits a short time for pending operations, ends those that remain, and tells the peers that this rank has left.
  /// Later operations fail. The destructor does the same. Must not be called from a completion callback of the group's
  /// own Work.
  virtual void leave() = 0;
  /// The error that ended the group, or success if the group has not failed.
  virtual Result<> status() const = 0;

  /// Waits for all operations that began before this call, and for their hooks. Therefore a hook must not call it.
  /// Returns kTimeout if the deadline passes first. An operation that fails counts as ended.
  virtual Result<> wait_for_pending(const Deadline& deadline) = 0;
  /// Replaces the completion hook; null removes it. The hook is called for operations that are submitted later, in the
  /// order in which they end.
  virtual void on_completion(CompletionHook hook) = 0;
  /// The timeout of each later operation that has none of its own. kInvalidArgument unless it is greater than zero.
  virtual Result<> set_timeout(Duration timeout) = 0;
  virtual Duration timeout() const = 0;
  /// The options with which the group was formed.
  virtual const GroupOptions& options() const = 0;
  virtual const GroupSpec& membership() const = 0;
  /// A random number that is equal at all ranks. A group that forms again under the same name has another one.
  virtual uint64_t id() const = 0;

  // The functions below form new groups. A new group inherits this group's options and timeout, and may outlive this
  // group. Each new group of one parent needs its own `name`. Except for duplicate(), the ranks of a new group exchange
  // addresses through `store`, under their own keys.

  /// Forms a group of the same ranks, whose calls need no common order with the calls of this group. A collective of
  /// this group: the ranks exchange addresses over it, and send nothing to a store. If it fails at one rank, the others
  /// wait for that rank in a collective of this group, which then fails.
  Result<std::unique_ptr<Group>> duplicate(const std::string& name);

  /// Forms a group of `ranks`, which become ranks 0, 1, ... in that order. All of them must call this with the same
  /// list. Other ranks may call it and get null. kInvalidArgument for a rank that is not in this group or that is
  /// listed twice.
  Result<std::unique_ptr<Group>> split(Store& store, const std::vector<Rank>& ranks, const std::string& name);
  /// Forms one group for each color >= 0, of the ranks that passed this color, ordered by key, then by rank. Returns
  /// null for a negative color. All ranks must call this.
  Result<std::unique_ptr<Group>> split(Store& store, int color, int key, const std::string& name);
  /// Forms a group of ranks from several groups. All ranks of the new group must call this.
  Result<std::unique_ptr<Group>> merge(Store& store, const GroupSpec& membership);
  /// Forms a group of the ranks that are not in `excluded`, in the same order. Only these ranks call this, all with the
  /// same list. This group may have failed, and the excluded ranks may be dead. With `abort_first`, pending operations
  /// are aborted; otherwise shrink() waits for them, at most timeout().
  Result<std::unique_ptr<Group>> shrink(Store& store, const std::vector<Rank>& excluded, bool abort_first);

  /// A barrier that reports missing ranks, like torch's monitored_barrier. The error names the first rank that did not
  /// come, or all missing ranks if `name_all` is set. The group stays usable. The barrier uses the store, so it works
  /// while collectives hang, and after a failure.
  Result<> monitored_barrier(Store& store, Duration timeout, bool name_all);

  /// The number of operations that have begun.
  virtual uint64_t sequence() const = 0;
  /// "shm" if all ranks share this host's memory, else the kinds of links to the other ranks ("shm+tcp"), including
  /// links that are not connected yet.
  virtual std::string transport() const = 0;
  /// True if messages, and collectives that do not reduce, take contiguous memory of the device with this type ("cuda"
  /// or "xpu", as torch names it) and index. The first such device is the only one of this process. The caller must
  /// first wait for the kernels that use the memory. `exchange` makes a device of this type current in the calling
  /// thread, by its index, and returns the index of the one before.
  virtual bool takes_device_memory(std::string_view /*type*/, int /*index*/,
                                   const std::function<int(int index)>& /*exchange*/) const {
    return false;
  }
  /// Memory for tensors that collectives read and write in place. Null if this rank shares no memory with others.
  /// Caution: a signal can stop a rank in the middle of a reduce or all_reduce of such tensors, and the collective then
  /// fails. When the rank continues, it may still write the piece that it had begun, up to 8 KiB of each tensor. Kill
  /// such a rank before you use the tensors' memory again.
  virtual std::shared_ptr<Arena> arena() const = 0;

 protected:
  /// Begins an operation whose arguments are valid.
  virtual Work begin(Operation&& operation, const CallOptions& options) = 0;
  /// Begins several in their order. The Work is that of the last one.
  virtual Work begin_all(std::vector<Operation>&& operations, const CallOptions& options);
  /// Forms a group of the same ranks over this one. `duplicate` describes the new group.
  virtual Result<std::unique_ptr<Group>> form_duplicate(const GroupSpec& duplicate);
  /// Forms a group of `ranks` of this group, of which this rank is one. `child` describes the new group.
  virtual Result<std::unique_ptr<Group>> form_child(Store& store, const std::vector<Rank>& ranks,
                                                    const GroupSpec& child);
  /// Forms a group of ranks from several groups.
  virtual Result<std::unique_ptr<Group>> form_merged(Store& store, const GroupSpec& merged);
  // The same for another group, because a group that is built on it cannot call its protected functions.
  static Result<std::unique_ptr<Group>> form_duplicate_of(Group& other, const GroupSpec& duplicate) {
    return other.form_duplicate(duplicate);
  }
  static Result<std::unique_ptr<Group>> form_child_of(Group& other, Store& store, const std::vector<Rank>& ranks,
                                                      const GroupSpec& child) {
    return other.form_child(store, ranks, child);
  }
  /// The options of a group that this one forms.
  GroupOptions inherited_options() const;

 private:
  Result<std::unique_ptr<Group>> form_among(Store& store, const std::vector<Rank>& ranks, const std::string& name);

  std::atomic<uint64_t> monitored_ = 0, shrunk_ = 0;  ///< number of calls so far; the same at every rank
};

}  // namespace muster
