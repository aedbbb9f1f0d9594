#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "muster/collective/operation.h"
#include "muster/group/engine/diagnosis.h"
#include "muster/group/engine/failure_detector.h"
#include "muster/group/engine/hierarchy.h"
#include "muster/group/engine/schedule_pipeline.h"
#include "muster/group/form/mesh.h"

namespace muster {

/// Runs one collective at a time over a mesh: through the host communicator if all ranks share memory, through host
/// communicators and links if several hosts have several ranks, else by a schedule over links. Used by the thread that
/// holds the group's execution lock. Other threads may call only the functions marked thread-safe.
///
/// Of its private functions, five form the engine, and the others are the three ways to run a call and what they share.
class CollectiveEngine {
 public:
  /// All ranks must call this. If one rank cannot get its part of the shared memory, all ranks use links instead, and
  /// each process logs a warning.
  static Result<std::unique_ptr<CollectiveEngine>> create(Mesh mesh, const GroupSpec& spec,
                                                          std::shared_ptr<Arena> arena, const Deadline& deadline);
  ~CollectiveEngine();  ///< Tells the peers that this rank has left.
  CollectiveEngine(const CollectiveEngine&) = delete;
  CollectiveEngine& operator=(const CollectiveEngine&) = delete;

  /// `next` returns the operation that run() will get after the current one, or null if that is not known yet. It is
  /// called during run(), and what it returns must stay valid until that run(). Set it before the first run().
  void set_next(std::function<const Operation*()> next) { next_ = std::move(next); }
  /// Blocks until the operation is done. After an error the engine is shut down: its links are closed with that error,
  /// so that every peer learns which rank failed first.
  Result<> run(const Operation& operation, const Deadline& deadline);

  /// Makes the current run() return `why` soon. Thread-safe.
  void request_abort(Error why);
  /// Closes the links with `why`. Later calls have no effect.
  void shut_down(const Error& why);
  /// The reason that peers get when this rank leaves in order.
  Error leave_reason() const;

  // Thread-safe, because their results do not change.
  std::string transport() const { return mesh_.transport; }
  std::shared_ptr<Arena> arena() const { return arena_; }
  /// The same at all ranks of this group, and different in every other group: rank 0 draws it at random when it
  /// announces itself.
  uint64_t group_id() const { return mesh_.members[0].instance; }

 private:
  CollectiveEngine(Mesh mesh, const GroupSpec& spec);
  // Forming: collective_engine_forming.cpp.
  Result<> join_host_comm(std::shared_ptr<Arena> arena);
  void drop_host_comm(const std::string& why);
  Result<bool> all_agree(bool yes, const Deadline& deadline);
  static SchedulePipeline pipeline_for(const Mesh& mesh);
  Hierarchy::Levels levels();

  Result<> compare_calls(const Operation& operation, const Deadline& deadline);
  Result<> dispatch(const Operation& operation, const Deadline& deadline);
  Result<> run_on_host_comm(const Operation& operation, const Deadline& deadline);
  Result<> run_over_links(const Operation& operation, const Deadline& deadline);
  Result<> begin_schedule(const Operation& operation, const std::vector<Rank>& ranks, Rank self,
                          const Deadline& deadline);
  Result<> finish_schedule(const Deadline& deadline, const Operation* whole = nullptr);
  void begin_next(const Operation& current);
  Result<> connect(const std::vector<Rank>& ranks, const Deadline& deadline);
  const std::vector<Rank>& host_ranks() const { return mesh_.topology.host_ranks(spec_.rank); }
  Result<> watch(Rank awaited);
  Error host_comm_error(Error error);
  Error report_of_failed_rank(Rank host_rank);

  const GroupSpec spec_;
  Mesh mesh_;
  FailureDetector detector_;
  Diagnosis diagnosis_;
  std::unique_ptr<HostComm> comm_;
  std::shared_ptr<Arena> arena_;        ///< tensor memory that the host communicator uses
  std::vector<Link*> links_;            ///< by rank; null while there is no link
  std::optional<Hierarchy> hierarchy_;  ///< if several hosts have several ranks
  SchedulePipeline pipeline_;
  std::function<const Operation*()> next_;
  std::vector<Rank> all_ranks_;        ///< 0, 1, ...
  std::vector<Link*> schedule_links_;  ///< of the current schedule, by its own ranks
  Bytes scaled_;                       ///< scaled copy of an input that must not change
};

}  // namespace muster
