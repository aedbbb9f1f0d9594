#pragma once

#include <memory>

#include "muster/base/bytes.h"
#include "muster/io/loop.h"
#include "muster/io/stream.h"

namespace muster {

inline constexpr Duration kLingerIdleTime = std::chrono::seconds(2);
inline constexpr Duration kLingerTime = std::chrono::seconds(30);

/// Closes a stream in an orderly way after its link is gone: sends `final_bytes`, shuts down the sending side, and
/// discards incoming bytes until the peer has closed too. Without this, unread bytes would make the kernel reset the
/// connection, and the reset would overtake the reason of the close. Ends when no byte has moved for kLingerIdleTime,
/// and after kLingerTime at most. The loop owns the stream.
void linger(Loop& loop, std::unique_ptr<Stream> stream, Bytes final_bytes);

}  // namespace muster
