#pragma once

#include <cstddef>

#include "muster/base/error.h"

namespace muster {

/// kResourceExhausted if shared memory of so many bytes is beyond this process's limit on file sizes. Must be called
/// before a memfd grows: beyond the limit the kernel sends the process SIGXFSZ instead of an error.
Result<> check_file_limit(size_t bytes);

}  // namespace muster
