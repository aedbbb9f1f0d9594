// The arguments and results of remote calls. The first byte says how many bytes are the elements of a tensor; the head
// of the message follows them.
#include <algorithm>

#include "muster/base/check.h"
#include "muster/base/hash.h"
#include "muster/torch/exception.h"
#include "muster/torch/rpc/autograd/context.h"
#include "muster/torch/rpc/value.h"

namespace muster::rpc {
namespace {

/// Reads a value and writes it again. Tensors, references and objects have more than one encoding, so they are only
/// read. Returns false for these.
bool copy_value(ValueReader& in, ValueWriter& out, int depth) {
  if (depth > kMaxDepth) throw_error(Error{ErrorCode::kProtocol, "too deep"});
  const auto copy_values = [&](size_t count) {
    bool same = true;
    for (size_t i = 0; i < count; ++i) same = copy_value(in, out, depth + 1) && same;
    return same;
  };
  switch (const Tag tag = in.next()) {
    case Tag::kNone:
      out.put_none();
      return true;
    case Tag::kFalse:
    case Tag::kTrue:
      out.put_bool(tag == Tag::kTrue);
      return true;
    case Tag::kInt:
      out.put_int(in.int_value());
      return true;
    case Tag::kFloat:
      out.put_float(in.float_value());
      return true;
    case Tag::kString:
      out.put_string(in.bytes_value());
      return true;
    case Tag::kBytes:
      out.put_bytes(in.bytes_value());
      return true;
    case Tag::kList: {
      const size_t count = in.count();
      out.begin_list(count);
      return copy_values(count);
    }
    case Tag::kTuple: {
      const size_t count = in.count();
      out.begin_tuple(count);
      return copy_values(count);
    }
    case Tag::kDict: {
      const size_t count = in.count();
      out.begin_dict(count);
      return copy_values(2 * count);
    }
    case Tag::kTensor: {
      const at::Tensor tensor = in.tensor_value();
      MUSTER_CHECK(tensor.is_contiguous(), "a tensor is not dense");
      const ByteView elements(static_cast<const uint8_t*>(tensor.data_ptr()), tensor.nbytes());
      (void)fnv1a(elements);  // a sanitizer sees a read outside of the message
      return false;
    }
    case Tag::kObject:
      (void)in.bytes_value();
      (void)copy_value(in, out, depth + 1);
      return false;
    case Tag::kRef:
      (void)in.ref_value();
      return false;
    case Tag::kAlias:
      (void)in.alias_value();
      return false;
  }
  return false;
}

void parse_one(ByteView elements, ByteView head) {
  const Message message{Bytes(head.begin(), head.end()), {Buffer::copy_of(elements)}};
  try {
    const bool has_context = context_record(message).has_value();
    ValueReader in(message);
    ValueWriter out;
    const bool same = copy_value(in, out, 0);
    in.finish();
    if (same && !has_context) MUSTER_CHECK(std::ranges::equal(out.take().head, head), "a value changes when repeated");
  } catch (const ErrorException&) {     // a damaged message
  } catch (const ArgumentException&) {  // a reference, which needs a worker
  }
}

}  // namespace
}  // namespace muster::rpc

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0 || data[0] >= size) return 0;
  muster::rpc::parse_one({data + 1, data[0]}, {data + 1 + data[0], size - 1 - data[0]});
  return 0;
}
