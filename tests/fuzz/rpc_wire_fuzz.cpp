// The messages of a batch between two RPC endpoints. The first byte chooses between a batch, an error and the record of
// a worker.
#include <algorithm>

#include "muster/base/check.h"
#include "muster/rpc/directory.h"
#include "muster/rpc/wire.h"

namespace muster::rpc {
namespace {

constexpr uint64_t kMaxBytes = uint64_t{1} << 40;

/// Messages that are accepted and written again must give the same bytes.
void parse_batch(ByteView body) {
  const ByteView whole = body;
  BatchWriter again;
  std::vector<Buffer> long_parts;
  while (!body.empty()) {
    auto parsed = parse_message(body, kMaxBytes);
    if (!parsed) return;
    MUSTER_CHECK(parsed->message.segments.size() == parsed->header.segments, "a segment is missing");
    if (!parsed->long_parts.empty()) {
      MUSTER_CHECK(body.empty(), "long parts are not at the end of the batch");
      return;  // their bytes are not here
    }
    if (!again.add(parsed->header, parsed->name, parsed->message, long_parts)) return;
  }
  const Bytes bytes = again.take({});
  MUSTER_CHECK(std::ranges::equal(ByteView(bytes).subspan(kBatchHeaderBytes), whole), "a batch changes when repeated");
}

void parse_one(uint8_t kind, ByteView bytes) {
  if (kind == 0) return parse_batch(bytes);
  if (kind == 1) {
    (void)parse_error(Message{Bytes(bytes.begin(), bytes.end()), {}});
    return;
  }
  if (const auto record = parse_worker_record(bytes)) {
    const Bytes again = encode(*record);
    MUSTER_CHECK(std::ranges::equal(again, bytes), "a record changes when repeated");
  }
}

}  // namespace
}  // namespace muster::rpc

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 0) muster::rpc::parse_one(data[0] % 3, {data + 1, size - 1});
  return 0;
}
