#pragma once

#include <memory>
#include <span>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/collective/buffer.h"
#include "muster/collective/schedule/schedule.h"
#include "muster/transport/link.h"

namespace muster {

/// The memory that a schedule's ranges refer to. Byte offsets run through all segments of the input and of the output.
struct Buffers {
  BufferView input, output;      ///< the same memory if the call is in place
  ReduceOp op = ReduceOp::kSum;  ///< a schedule only sums for kAverage; the caller divides (divide_by in reduce.h)
};

/// A schedule with all memory that a run needs, so that a run does not allocate. There is one run at a time. The
/// completions of the links drive it, in the thread that drives their loop (or the simulator). Not thread-safe.
///
/// After an error no more steps start, but other links may still use the buffers and this object: close these links
/// before you free anything. It may be moved while it runs, but not destroyed.
class PreparedSchedule {
 public:
  explicit PreparedSchedule(Schedule schedule);
  ~PreparedSchedule();
  PreparedSchedule(PreparedSchedule&&) noexcept;
  PreparedSchedule& operator=(PreparedSchedule&&) noexcept;

  const Schedule& schedule() const;
  /// The ranks that it exchanges bytes with, ascending.
  const std::vector<Rank>& peers() const;

  /// Begins a run. `links[r]` is the link to rank r (null if the schedule does not use it). `scratch` has at least
  /// schedule().scratch_bytes. With `call`, the first bytes to every peer are a header with this call and the number of
  /// bytes to come; kMismatch names the first peer whose header differs. Either all ranks give a call or none. `done`
  /// is called once, possibly inside start(): when all steps have ended, or immediately with the first error. All
  /// arguments must live until `done` reports success, or until the links are closed.
  void start(std::span<Link* const> links, Buffers buffers, MutableByteView scratch, Completion done,
             const Call* call = nullptr);
  /// True from start() until `done` is called.
  bool running() const;
  /// True if all steps of the current or last run have begun: its transfers are under way, and no others follow.
  bool all_begun() const;
  /// The peers of the steps that are running, in rank order. For the message of a timeout.
  std::vector<Rank> waiting_for() const;

 private:
  struct Run;
  std::unique_ptr<Run> run_;
};

}  // namespace muster
