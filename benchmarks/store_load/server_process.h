#pragma once

#include <sys/types.h>

#include "muster/base/error.h"

namespace muster::load {

/// What the kernel says about a server's process. Everything is 0 once it has ended.
class ServerProcess {
 public:
  explicit ServerProcess(pid_t pid) : pid_(pid) {}
  /// Of all its threads, also those that ended.
  double cpu_seconds() const;
  size_t resident_bytes() const;
  /// How many descriptors are open.
  size_t descriptors() const;

 private:
  pid_t pid_;
};

/// As many descriptors as the system lets this process have.
void raise_descriptor_limit();

}  // namespace muster::load
