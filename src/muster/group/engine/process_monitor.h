#pragma once

#include <functional>

#include "muster/base/clock.h"
#include "muster/collective/rank_info.h"
#include "muster/io/fd.h"
#include "muster/io/loop.h"

namespace muster {

/// What a rank said before it left or died may still be on its way; as long may one that leaves wait for it to be read.
inline constexpr Duration kLastWords = std::chrono::milliseconds(500);

/// Has `loop` call `died` once, kLastWords after the process of `peer` has ended: what its links still have to say
/// comes first, for it may have left in order. A process that was forked by a peer, as data loaders are, keeps the
/// peer's sockets open beyond its death; the kernel tells of the death itself. The result is what the loop watches, and
/// what to unwatch. Empty where there is nothing to watch: another host, this very process, an old kernel, or gone
/// already; then its links say so.
Fd watch_process(Loop& loop, const RankInfo& self, const RankInfo& peer, std::function<void()> died);

}  // namespace muster
