// The record that a rank writes to the store. A record that is accepted must be encoded to the same bytes.
#include "muster/base/check.h"
#include "muster/collective/rank_info.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const muster::ByteView record(data, size);
  if (const auto member = muster::parse_rank_info(record)) {
    const muster::Bytes again = muster::encode(*member);
    MUSTER_CHECK(std::equal(again.begin(), again.end(), record.begin(), record.end()),
                 "a record changes when repeated");
    MUSTER_CHECK(!member->to_string().empty(), "a member without a name");
  }
  return 0;
}
