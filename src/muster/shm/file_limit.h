#pragma once

#include <cstddef>

#include "muster/base/error.h"

namespace muster {

/// Whether shared memory of so many bytes is within this process's limit on file sizes. To be asked first: beyond it
/// memory does not fail to grow, the process gets a signal (SIGXFSZ). kResourceExhausted says how to raise it.
Result<> check_file_limit(size_t bytes);

}  // namespace muster
