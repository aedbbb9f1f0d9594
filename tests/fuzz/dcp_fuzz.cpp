// Pickles of a distributed checkpoint: `.metadata`, and those of tensors and numbers. The parsers do not need torch.
// What is accepted must be the same after it is written and read again.
#include "muster/base/check.h"
#include "muster/torch/dcp/metadata.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const muster::ByteView bytes(data, size);
  if (const auto metadata = muster::dcp::decode_metadata(bytes)) {
    const auto again = muster::dcp::decode_metadata(muster::dcp::encode_metadata(*metadata));
    MUSTER_CHECK(again && *again == *metadata, "metadata change when repeated");
  }
  if (const auto tensor = muster::dcp::decode_tensor(bytes)) {
    MUSTER_CHECK(tensor->end() >= tensor->offset, "elements lie before the first one");
    const auto again = muster::dcp::decode_tensor(muster::dcp::encode_tensor(*tensor, 0));
    MUSTER_CHECK(again && *again == *tensor, "a tensor changes when repeated");
  }
  if (const auto number = muster::dcp::decode_integer(bytes)) {
    const auto again = muster::dcp::decode_integer(muster::dcp::encode_integer(*number));
    MUSTER_CHECK(again && *again == *number, "a number changes when repeated");
  }
  return 0;
}
