#include "muster/store/protocol/messages.h"
#include "store_fuzz.h"

namespace muster {
namespace {

// A message that is accepted must be encoded to the same bytes.
void read_as_message(ByteView input) {
  FrameParser parser(kMaxMessageBytes);
  parser.feed(input);
  auto frame = parser.next();
  if (!frame || !*frame) return;
  const Bytes original = encode_frame((*frame)->header.kind, (*frame)->payload, (*frame)->header.flags);
  if (const auto request = decode_request((*frame)->header, (*frame)->payload)) {
    if (encode_request(*request) != original) std::abort();
  }
  if (const auto reply = decode_reply((*frame)->header, (*frame)->payload)) {
    const bool known = reply->status || reply->status.error().code != ErrorCode::kInternal;
    if (known && encode_reply(*reply) != original) std::abort();
  }
}

}  // namespace
}  // namespace muster

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  muster::read_as_message({data, size});
  muster::play_client(*muster::muster_protocol(), {data, size});
  return 0;
}
