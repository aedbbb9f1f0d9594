#pragma once

#include <memory>
#include <span>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/collective/buffer.h"
#include "muster/collective/schedule/schedule.h"
#include "muster/transport/link.h"

namespace muster {

/// What a schedule's ranges refer to: input and output are addressed by byte offset, whatever segments they consist of.
struct Buffers {
  BufferView input, output;      ///< the same memory where the call is in place
  ReduceOp op = ReduceOp::kSum;  ///< kAverage is summed here; whoever runs the schedule divides (divide_by in reduce.h)
};

/// A schedule, and all that running it needs, made once: a run of it allocates nothing of its own. One run at a time.
/// Driven by the completions of the links: whoever drives their loop (or the simulator) drives it. Not thread-safe.
///
/// After an error no step is started, but other links may still use the buffers and this object: close those links
/// before freeing anything. It may be moved and assigned to also while it runs, and must not be destroyed then.
class PreparedSchedule {
 public:
  explicit PreparedSchedule(Schedule schedule);
  ~PreparedSchedule();
  PreparedSchedule(PreparedSchedule&&) noexcept;
  PreparedSchedule& operator=(PreparedSchedule&&) noexcept;

  const Schedule& schedule() const;
  /// The ranks that it exchanges bytes with, ascending.
  const std::vector<Rank>& peers() const;

  /// Begins a run. `links[r]` is the link to rank r (null where the schedule needs none, and at the own rank);
  /// `scratch` has at least schedule().scratch_bytes. With `call`, the first bytes to every peer say what this rank
  /// calls and how much it sends, and kMismatch names the first peer that says something else; all ranks must give one,
  /// or none.
  /// `done` is called once, possibly from within start(): when every step has ended, or with the first error at once.
  /// All of these must live until it reported success, or until the links were closed.
  void start(std::span<Link* const> links, Buffers buffers, MutableByteView scratch, Completion done,
             const Call* call = nullptr);
  /// Whether a run was started and `done` was not called yet.
  bool running() const;
  /// The ranks with which a step that was started is not over, in rank order: whom a missed deadline waited for.
  std::vector<Rank> waiting_for() const;

 private:
  struct Run;
  std::unique_ptr<Run> run_;
};

}  // namespace muster
