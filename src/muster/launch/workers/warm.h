#pragma once

#include <string>
#include <vector>

#include "muster/io/fd.h"
#include "muster/launch/options/options.h"

namespace muster {

/// The zygote that `muster warm` keeps between runs listens on a Unix socket in the user's private directory. The name
/// of the socket is a digest of everything that a fork cannot change later: the Python, the modules to import, the
/// variables that imports read, and the zygote's own text. The zygote itself checks that the installed modules have not
/// changed.

struct WarmKey {
  std::string python;  ///< as called, because a link in a virtual environment selects that environment
  std::vector<std::string> preload;
  Environment environment;
};
std::string warm_digest(const WarmKey& key);

/// The path of the socket of this zygote.
Result<std::string> warm_path(const WarmKey& key);

/// Connects to the zygote with this socket. kNotFound if there is none.
Result<Fd> connect_warm(const std::string& path);

}  // namespace muster
