// Bytes from a server to a client of the store. The first byte says how the rest is cut into reads. For any cut, the
// client must see the same replies and the same end. A reply that it accepts must be encoded to the same bytes.
#include <algorithm>

#include "muster/base/check.h"
#include "muster/store/protocol/messages.h"

namespace muster {
namespace {

struct Heard {
  Bytes replies;  // the parsed replies, encoded again
  bool lost = false;
  friend bool operator==(const Heard&, const Heard&) = default;
};

Heard listen(ByteView stream, size_t piece) {
  FrameParser parser(kMaxMessageBytes);
  Heard heard;
  for (; !stream.empty(); stream = stream.subspan(std::min(piece, stream.size()))) {
    parser.feed(stream.first(std::min(piece, stream.size())));
    while (true) {
      const auto reply = next_reply(parser);
      heard.lost = !reply;
      if (heard.lost) return heard;
      if (!*reply) break;
      const Bytes again = encode_reply(**reply);
      heard.replies.insert(heard.replies.end(), again.begin(), again.end());
    }
  }
  return heard;
}

}  // namespace
}  // namespace muster

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const muster::ByteView stream(data + 1, size - 1);
  const muster::Heard whole = muster::listen(stream, stream.size());
  MUSTER_CHECK(whole.replies.size() <= stream.size(), "the client heard more than was said");
  MUSTER_CHECK(muster::listen(stream, size_t{1} + data[0]) == whole, "replies depend on how they were cut");
  return 0;
}
