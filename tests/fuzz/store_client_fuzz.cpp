// Bytes from a server to a client of the store. The first byte says how the rest is cut into reads. For any cut, the
// client must see the same replies and the same end. A reply that it accepts must be encoded to the same bytes.
#include <algorithm>

#include "muster/base/check.h"
#include "muster/store/protocol/messages.h"

namespace muster {
namespace {

struct Parsed {
  Bytes replies;  // the parsed replies, encoded again
  bool lost = false;
  friend bool operator==(const Parsed&, const Parsed&) = default;
};

Parsed parse(ByteView stream, size_t piece) {
  FrameParser parser(kMaxMessageBytes);
  Parsed parsed;
  for (; !stream.empty(); stream = stream.subspan(std::min(piece, stream.size()))) {
    parser.feed(stream.first(std::min(piece, stream.size())));
    while (true) {
      const auto reply = next_reply(parser);
      parsed.lost = !reply;
      if (parsed.lost) return parsed;
      if (!*reply) break;
      const Bytes again = encode_reply(**reply);
      parsed.replies.insert(parsed.replies.end(), again.begin(), again.end());
    }
  }
  return parsed;
}

}  // namespace
}  // namespace muster

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const muster::ByteView stream(data + 1, size - 1);
  const muster::Parsed whole = muster::parse(stream, stream.size());
  MUSTER_CHECK(whole.replies.size() <= stream.size(), "the client parsed more than was sent");
  MUSTER_CHECK(muster::parse(stream, size_t{1} + data[0]) == whole, "replies depend on how they were cut");
  return 0;
}
