#pragma once

#include <functional>

#include "muster/base/clock.h"
#include "muster/io/fd.h"
#include "muster/io/host_identity.h"
#include "muster/io/loop.h"

namespace muster {

/// How long a rank waits for the last report of a peer that left or died, and how long a rank that leaves waits until
/// its own report has been written.
inline constexpr Duration kLastReportTime = std::chrono::milliseconds(500);

/// Makes `loop` call `died` once, kLastReportTime after the process of `peer` has ended. The delay is needed because
/// the links may still hold the report that the peer left in order. Links alone do not show a death, because a child of
/// the peer, such as a data loader, keeps the peer's sockets open.
///
/// Returns the descriptor that the loop watches; the caller must unwatch it. Empty if the process cannot be monitored:
/// it runs on another host, is this process, has ended already, or the kernel is too old. Then only the links show that
/// the peer is gone.
Fd monitor_process(Loop& loop, const ProcessIdentity& self, const ProcessIdentity& peer, std::function<void()> died);

}  // namespace muster
