// The header of a message between two ranks.
#include "muster/base/check.h"
#include "muster/group/p2p/wire.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const muster::ByteView input(data, size);
  const auto header = muster::parse_message_header(input);
  if (!header) return 0;
  MUSTER_CHECK(size >= muster::kMessageHeaderBytes, "a header is read out of too few bytes");
  MUSTER_CHECK(header->kind != muster::MessageKind::kEager || header->bytes <= muster::kEagerBytes,
               "an eager message may be too long");
  const auto again = muster::encode(*header);
  MUSTER_CHECK(std::equal(again.begin(), again.end(), input.begin()), "a header changes when repeated");
  return 0;
}
