#pragma once

#include <memory>
#include <span>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/collective/buffer.h"
#include "muster/collective/schedule.h"
#include "muster/transport/link.h"

namespace muster {

/// What a schedule's ranges refer to: input and output are addressed by byte offset, whatever segments they consist of.
struct Buffers {
  BufferView input, output;      ///< the same memory where the call is in place
  ReduceOp op = ReduceOp::kSum;  ///< kAverage is summed here; whoever runs the schedule divides (divide_by in reduce.h)
};

/// One running schedule. Driven by the completions of its links: whoever drives their loop (or the simulator) drives
/// it. Not thread-safe.
///
/// `done` is called once, possibly from within start(): when every step has ended, or with the first error at once.
/// After an error no step is started, but other links may still use the buffers: close those links before freeing
/// anything. Buffers, links and the schedule must live until `done` reported success, or until the links were closed.
/// The Execution itself may be destroyed at any time, also by `done`; then `done` is not called any more.
class Execution {
 public:
  /// `links[r]` is the link to rank r (null where the schedule needs none, and at the own rank). `scratch` has at least
  /// schedule.scratch_bytes. Call start() once.
  Execution(const Schedule& schedule, std::span<Link* const> links, Buffers buffers, MutableByteView scratch,
            Completion done);
  ~Execution();
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;
  void start();
  /// Whether `done` was called.
  bool finished() const;
  /// The ranks with which a step that was started is not over, in rank order: whom a missed deadline waited for.
  std::vector<Rank> waiting_for() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;  // shared with the completions that links hold
};

}  // namespace muster
