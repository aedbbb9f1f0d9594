#pragma once

#include "muster/store/store.h"

namespace muster {

/// A store in a Redis server (5 or newer) at "redis://[[user]:password@]host[:6379][/database][/prefix]" or
/// "redis+unix:///path/of.sock", also with ?prefix= and ?database=. Its operations are Lua scripts, each of which Redis
/// runs at once and alone; a wait listens to a channel of its key. Calls in several threads have connections of their
/// own. After a lost server the next call connects anew. Queue items outlive their takers' deaths, but one that was on
/// its way to a taker whose connection broke is lost.
Result<std::unique_ptr<Store>> redis_store(const std::string& url, const Deadline& deadline);

}  // namespace muster
