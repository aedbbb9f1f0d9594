// Reader. The input says which reads to make on the rest of the input. Each read must return the bytes at its position
// or fail, and must never read past the end.
#include <algorithm>

#include "muster/base/bytes.h"
#include "muster/base/check.h"

namespace {

void read_some(muster::ByteView script, muster::ByteView bytes) {
  muster::Reader reader(bytes);
  for (const uint8_t step : script) {
    const size_t before = reader.remaining();
    bool read = false;
    size_t count = 0;
    switch (step % 6) {
      case 0:
        read = reader.get<uint8_t>().has_value(), count = 1;
        break;
      case 1:
        read = reader.get<uint16_t>().has_value(), count = 2;
        break;
      case 2:
        read = reader.get<uint64_t>().has_value(), count = 8;
        break;
      case 3: {
        const auto view = reader.get_raw(step);
        read = view.has_value(), count = step;
        if (read && count > 0) MUSTER_CHECK(view->data() == bytes.data() + (bytes.size() - before), "a misplaced view");
        break;
      }
      default: {
        const auto text = reader.get_string();
        read = text.has_value(), count = read ? 4 + text->size() : 0;
        if (!read) return;  // the read consumed the length, but the string is missing
      }
    }
    MUSTER_CHECK(reader.remaining() == before - (read ? count : 0), "a read moved by another length than its own");
    MUSTER_CHECK(read || before < count, "a read failed although its bytes were there");
  }
  MUSTER_CHECK(reader.finish().has_value() == (reader.remaining() == 0), "finish() miscounts");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const size_t steps = std::min<size_t>(data[0] % 32, size - 1);
  read_some({data + 1, steps}, {data + 1 + steps, size - 1 - steps});
  return 0;
}
