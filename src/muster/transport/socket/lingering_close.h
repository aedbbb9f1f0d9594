#pragma once

#include <memory>

#include "muster/base/bytes.h"
#include "muster/io/loop.h"
#include "muster/io/stream.h"

namespace muster {

/// Lets a stream end well after its link is gone: sends `final_bytes`, says that nothing follows, and discards what
/// still comes until the peer has closed too. A socket that is closed with bytes unread resets the connection, and the
/// reset would overtake the reason of the close. Takes kLingerTime at most, as far as the loop is driven; the loop
/// owns it.
inline constexpr Duration kLingerTime = std::chrono::seconds(2);
void linger(Loop& loop, std::unique_ptr<Stream> stream, Bytes final_bytes);

}  // namespace muster
