#pragma once

#include "muster/io/connection.h"
#include "muster/store/store.h"

namespace muster {

/// A store behind a server that speaks the muster dialect at "tcp://..." or "unix:...". Calls from several threads
/// share the one connection and may all wait at once.
Result<std::unique_ptr<Store>> remote_store(const std::string& url, Credentials credentials, const Deadline& deadline);

}  // namespace muster
