#pragma once

#include "muster/store/store.h"

namespace muster {

/// A store in a Redis server (5 or newer) at "redis://[[user]:password@]host[:6379][/database][/prefix]" or
/// "redis+unix:///path/of.sock", also with ?prefix= and ?database=. "rediss://host..." is the same over TLS, also with
/// ?ca=, ?cert= and ?key=, the names of PEM files. Each operation is a Lua script, which Redis runs
/// atomically. A wait listens to a channel of its key. Each call uses its own connection. After the server was lost,
/// the next call makes a new connection. A queue item that was on its way to a client whose connection broke is lost.
Result<std::unique_ptr<Store>> redis_store(const std::string& url, const Deadline& deadline);

}  // namespace muster
