#pragma once

#include <string>

#include "muster/io/fd.h"

namespace muster {

/// Makes a file, or puts a new one in the place of one that is there, and locks it for this process alone. It appears
/// under its name when the lock is held: who finds it without may take it for a dead process'. Empty, and errno says
/// why, where it cannot be made.
Fd make_locked_file(const std::string& path);

/// Removes such a file if its process has died. True if it did.
bool remove_abandoned_file(const std::string& path);

}  // namespace muster
