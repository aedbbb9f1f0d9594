#include "muster/rpc/message.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace muster::rpc {
namespace {

constexpr std::align_val_t kAlignment{64};

}  // namespace

Buffer Buffer::allocate(size_t bytes) {
  void* const data = ::operator new(std::max<size_t>(bytes, 1), kAlignment);
  return {std::shared_ptr<void>(data, [](void* memory) { ::operator delete(memory, kAlignment); }), data, bytes};
}

Buffer Buffer::copy_of(ByteView bytes) {
  Buffer copy = allocate(bytes.size());
  if (!bytes.empty()) std::memcpy(copy.data(), bytes.data(), bytes.size());
  return copy;
}

}  // namespace muster::rpc
