#pragma once

#include <string>
#include <vector>

#include "muster/io/fd.h"
#include "muster/launch/options/options.h"

namespace muster {

/// The zygote that `muster warm` keeps for its user between runs listens on a Unix socket in a folder that nobody else
/// can enter. The socket's name is a digest of whatever a fork could not change later: the Python, the modules to
/// import, the variables that are read when they are imported, and the zygote's own text. Whether what it imported is
/// still what is installed it checks itself.

struct WarmKind {
  std::string python;  ///< as it is called: a link in a virtual environment is that environment
  std::vector<std::string> preload;
  Environment environment;
};
std::string warm_digest(const WarmKind& kind);

/// Where the warm zygote of this kind listens.
Result<std::string> warm_path(const WarmKind& kind);

/// Connects to the warm zygote of this kind. kNotFound when there is none.
Result<Fd> connect_warm(const WarmKind& kind);
Result<Fd> connect_warm_at(const std::string& path);

}  // namespace muster
