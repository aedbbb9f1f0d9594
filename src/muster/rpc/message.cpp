#include "muster/rpc/message.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace muster::rpc {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

/// A large buffer is new memory each time, and its page faults would take as long as the copy into it. Huge pages need
/// one fault for 512 pages.
Buffer Buffer::allocate(size_t bytes) {
  const std::align_val_t alignment{bytes >= 2 * kHugePage ? kHugePage : kAlignment};
  void* const data = ::operator new(std::max<size_t>(bytes, 1), alignment);
  if (bytes >= 2 * kHugePage) (void)madvise(data, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  return {std::shared_ptr<void>(data, [alignment](void* memory) { ::operator delete(memory, alignment); }), data,
          bytes};
}

Buffer Buffer::copy_of(ByteView bytes) {
  Buffer copy = allocate(bytes.size());
  if (!bytes.empty()) std::memcpy(copy.data(), bytes.data(), bytes.size());
  return copy;
}

}  // namespace muster::rpc
