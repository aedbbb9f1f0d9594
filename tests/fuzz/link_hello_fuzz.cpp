// The hello that a peer sends when a link begins, and the reason that it sends when the link ends.
#include "muster/base/check.h"
#include "muster/transport/link_frame.h"
#include "muster/transport/link_hello.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using muster::ByteView;
  const ByteView input(data, size);

  if (const auto hello = muster::parse_hello(input)) {
    const muster::Bytes again = muster::encode(*hello);
    MUSTER_CHECK(std::equal(again.begin(), again.end(), input.begin(), input.end()), "a hello changes when repeated");
    muster::LinkHello self = *hello;
    self.rank = 0;
    (void)muster::check_hello(self, *hello, 1);
  }

  if (size < muster::kFrameHeaderBytes) return 0;
  const auto header = muster::decode_frame_header(input.first(muster::kFrameHeaderBytes), muster::kMaxControlFrame);
  const ByteView payload = input.subspan(muster::kFrameHeaderBytes);
  if (!header || header->length != payload.size()) return 0;
  const muster::Error why = muster::parse_close(*header, payload, muster::Peer{3, "host", 9, 512});
  MUSTER_CHECK(why.rank >= muster::kNoRank && why.rank < 512, "a close frame names a rank that does not exist");
  const muster::Bytes repeated = muster::encode_close(&why);
  MUSTER_CHECK(repeated.size() <= muster::kFrameHeaderBytes + muster::kMaxControlFrame,
               "a close frame grows too large");
  return 0;
}
