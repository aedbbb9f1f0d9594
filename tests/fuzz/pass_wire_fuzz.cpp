// The messages of a distributed backward pass. The first byte chooses between a part and the end of a failed pass.
#include <algorithm>

#include "muster/base/check.h"
#include "muster/torch/rpc/autograd/pass_wire.h"

namespace muster::rpc {
namespace {

/// Messages that are accepted and written again must give the same bytes.
void parse_one(uint8_t kind, ByteView bytes) {
  const Message message{Bytes(bytes.begin(), bytes.end()), {}};
  Message again;
  if (kind == 0) {
    auto part = decode_part(message);
    if (!part) return;
    again = encode(std::move(*part));
  } else {
    const auto abort = decode_abort(message);
    if (!abort) return;
    again = encode(*abort);
  }
  MUSTER_CHECK(std::ranges::equal(again.head, bytes), "a message of a backward pass changes when repeated");
}

}  // namespace
}  // namespace muster::rpc

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 0) muster::rpc::parse_one(data[0] % 2, {data + 1, size - 1});
  return 0;
}
