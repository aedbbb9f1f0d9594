#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>

#include "muster/collective/operation.h"
#include "muster/flight/report.h"
#include "muster/group/engine/fingerprint_check.h"
#include "muster/group/engine/hierarchy.h"
#include "muster/group/engine/schedule_runner.h"
#include "muster/group/form/mesh.h"

namespace muster {

/// Runs one collective at a time over a mesh: through the host communicator if all ranks share memory, through host
/// communicators and links if several hosts have several ranks, else by a schedule over links. The thread that holds
/// the group's execution lock uses it. Other threads may call only request_abort() and the functions marked
/// thread-safe.
class CollectiveEngine {
 public:
  /// Where a rank of a group that links all pairs cannot have its part of the shared memory, all do without, and say so
  /// once. All ranks call.
  static Result<std::unique_ptr<CollectiveEngine>> create(Mesh mesh, const GroupSpec& membership,
                                                          std::shared_ptr<Arena> arena, const Deadline& deadline);
  ~CollectiveEngine();  ///< tells the peers that this rank has left
  CollectiveEngine(const CollectiveEngine&) = delete;
  CollectiveEngine& operator=(const CollectiveEngine&) = delete;

  /// Blocks until it is done. After an error the engine is dead: its links are closed with that error, so that every
  /// peer learns who failed first.
  Result<> run(const Operation& operation, const Deadline& deadline);

  /// Makes a run() under way return `why` soon. Thread-safe.
  void request_abort(Error why);
  /// The reason of one that leaves in order.
  Error farewell() const;
  /// Closes the links with `why`, unless it is dead already.
  void die(const Error& why);

  // These do not change: thread-safe.
  std::string transport() const { return mesh_.transport; }
  std::shared_ptr<Arena> arena() const { return arena_; }
  /// The same at all ranks of this group, and in no other: what rank 0 drew when it announced itself.
  uint64_t group_id() const { return mesh_.members[0].instance; }

 private:
  CollectiveEngine(Mesh mesh, const GroupSpec& membership);
  Result<> join_host_comm(std::shared_ptr<Arena> arena);
  void do_without_host_comm(const std::string& why);
  Result<bool> all_agree(bool mine, const Deadline& deadline);
  void tune();
  tl::unexpected<Error> refuse(const Call& call);
  void watch_link(Rank rank, Link& link);
  void watch_processes();
  void on_link_closed(Rank rank, const Error& why);
  void on_peer_call(Rank rank, ByteView note);
  Result<> watch(Rank awaited);
  Result<> check_desync();
  Result<> agree(const Operation& operation, const Deadline& deadline);
  const std::vector<Rank>& host_ranks() const;
  Result<> dispatch(const Operation& operation, const Deadline& deadline);
  Result<> run_alone(const Operation& operation);
  Result<> run_by_links(const Operation& operation, const Deadline& deadline);
  double factor_before(const Operation& operation) const;
  void multiply_input(Operation& operation);
  Result<> begin_passage(const Operation& operation, const std::vector<Rank>& ranks, Rank self,
                         const Deadline& deadline);
  Result<> link_with(const std::vector<Rank>& ranks, const Deadline& deadline);
  Result<> end_passage(const Deadline& deadline);
  Hierarchy::Levels levels();
  Error of_group(Error error);
  const std::vector<Rank>& carriers(int shard);
  Error timeout_error(const std::vector<Rank>& awaited);
  std::vector<Rank> silent_peers();
  Error drain_peer_error(Rank place);
  void skip_bytes(Rank rank);
  std::optional<Error> abort_requested();
  Error annotate(Error error, const Call& call) const;
  bool explain(Error& error) const;
  bool explain(Error& error, uint64_t sequence) const;
  std::vector<RankState> collect_rank_states(uint64_t sequence) const;

  GroupSpec membership_;
  Mesh mesh_;
  std::unique_ptr<HostComm> comm_;
  std::shared_ptr<Arena> arena_;              ///< of the host communicator
  std::vector<Link*> links_;                  ///< by rank; null where there is none (yet)
  std::vector<std::optional<Error>> closed_;  ///< by rank: why its link ended
  std::vector<Fd> processes_;                 ///< of peers on this host, as pidfds: links stay
                                              ///< open while a child of the dead holds them
  const bool compares_ = fingerprint_check_enabled();
  const Call* running_ = nullptr;          ///< the call under way
  std::vector<std::optional<Call>> told_;  ///< by rank: the last call that it waited in for long
  Deadline next_look_ = Deadline::never();
  Duration patience_{};         ///< from one look to the next; zero before the first
  bool dead_ = false;           ///< die() was called
  std::optional<Error> fatal_;  ///< the first failure: no call runs any more
  ScheduleRunner schedule_runner_;
  std::optional<Hierarchy> hierarchy_;  ///< where hosts have several ranks
  std::vector<Rank> everyone_;          ///< 0, 1, ...
  std::vector<Rank> carriers_;          ///< by host, for the operation that runs across
  std::vector<Link*> route_;            ///< the links of the schedule runner under way
  Bytes multiplied_;                    ///< an input that must stay as it is, times its factor
  Bytes skipped_;                       ///< room for bytes that nobody takes any more
  std::atomic<bool> abort_flag_ = false;
  std::mutex abort_mutex_;
  std::optional<Error> abort_;
};

}  // namespace muster
