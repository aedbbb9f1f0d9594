#pragma once

#include "muster/io/connection.h"
#include "muster/store/store.h"

namespace muster {

/// A store in muster's server at "tcp://..." or "unix:...". Calls from several threads share one connection and may
/// wait at the same time.
Result<std::unique_ptr<Store>> remote_store(const std::string& url, Credentials credentials, const Deadline& deadline);

}  // namespace muster
