#pragma once

#include <functional>
#include <memory>
#include <span>

#include "muster/base/bytes.h"
#include "muster/collective/schedule.h"
#include "muster/transport/link.h"

namespace muster {

struct Buffers {
  const void* input = nullptr;
  void* output = nullptr;
  Dtype dtype = Dtype::kUint8;   ///< of reductions
  ReduceOp op = ReduceOp::kSum;  ///< kAverage is summed here; whoever runs the schedule divides (scale_by_inverse)
};

/// One running schedule. Driven by the completions of its links: whoever drives their loop (or the simulator) drives
/// it. `done` is called once, with the first error if there was one; buffers and links must live until then or until
/// the Execution is destroyed after its links were closed.
class Execution {
 public:
  /// `links[r]` is the link to rank r (null where the schedule needs none, and at the own rank). `scratch` has at least
  /// schedule.scratch_bytes. Call start() once.
  Execution(const Schedule& schedule, std::span<Link* const> links, Buffers buffers, MutableByteView scratch,
            Completion done);
  ~Execution();
  void start();
  bool finished() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster
