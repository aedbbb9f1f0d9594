#pragma once

#include <string>
#include <vector>

namespace muster {

/// `muster warm attach PROGRAM CHANNEL SERVER_END PYTHON [MODULE...]`: a program that uses muster.forkserver starts it.
/// The first three are descriptors: a socket whose other end the program closes at its end, and a socket pair.
///
/// Asks the warm zygote of this Python and these modules for a fork server, which gets SERVER_END. Then passes signals
/// on to it until the program or the fork server ends. A terminal signals all processes of the program's group, but the
/// processes of a warm zygote are in another session. Returns 1 if there is no such zygote.
int attach_to_warm(const std::string& own_path, const std::vector<std::string>& args);

}  // namespace muster
