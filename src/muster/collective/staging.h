#pragma once

#include <cstddef>

#include "muster/base/clock.h"
#include "muster/base/error.h"

namespace muster {

/// Copies from and to a device that go on while an operation runs on their memory of the host. The operation reads and
/// writes it from its beginning to its end. Called by the thread that runs the operation.
class Staging {
 public:
  virtual ~Staging() = default;
  /// Waits until the first `end` bytes of the input are there. kTimeout: they have not come by the deadline.
  virtual Result<> wait_for_input(size_t end, const Deadline& deadline) = 0;
  /// The first `end` bytes of the output are complete.
  virtual Result<> output_is_complete(size_t end) = 0;
};

}  // namespace muster
