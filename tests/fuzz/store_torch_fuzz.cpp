#include "store_fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  muster::play_client(*muster::torch_protocol(), {data, size});
  return 0;
}
