#include "muster/rpc/message.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>

namespace muster::rpc {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kLarge = 2 * kHugePage;
/// The most memory that is kept for the next large buffers.
constexpr size_t kMaxKept = size_t{256} << 20;

/// Memory of a large buffer. Huge pages need one page fault for 512 pages.
struct LargeBlock {
  struct Free {
    void operator()(void* memory) const { ::operator delete(memory, std::align_val_t(kHugePage)); }
  };
  std::unique_ptr<void, Free> memory;
  size_t bytes = 0;
};

/// Blocks that were given back. The kernel would have to clear new memory, which takes half as long as a copy into it.
struct KeptBlocks {
  std::mutex mutex;
  std::vector<LargeBlock> blocks;
  size_t bytes = 0;
};
/// Never destroyed: buffers may outlive all static objects.
KeptBlocks& kept_blocks() {
  static auto* const kKept = new KeptBlocks();
  return *kKept;
}

/// Here and in give_back() the lock is only tried: another thread may have held it when this process was forked.
LargeBlock take_block(size_t bytes) {
  KeptBlocks& kept = kept_blocks();
  if (const std::unique_lock lock(kept.mutex, std::try_to_lock); lock) {
    const auto found = std::ranges::find_if(
        kept.blocks, [&](const LargeBlock& block) { return block.bytes >= bytes && block.bytes / 2 <= bytes; });
    if (found != kept.blocks.end()) {
      LargeBlock block = std::move(*found);
      kept.blocks.erase(found);
      kept.bytes -= block.bytes;
      return block;
    }
  }
  const size_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  LargeBlock block{decltype(LargeBlock::memory)(::operator new(whole, std::align_val_t(kHugePage))), whole};
  (void)madvise(block.memory.get(), whole, MADV_HUGEPAGE);
  return block;
}

/// The kernel may take the memory of a kept block if it needs some.
void give_back(LargeBlock block) {
  KeptBlocks& kept = kept_blocks();
  const std::unique_lock lock(kept.mutex, std::try_to_lock);
  if (!lock || kept.bytes + block.bytes > kMaxKept) return;
  (void)madvise(block.memory.get(), block.bytes, MADV_FREE);
  kept.bytes += block.bytes;
  kept.blocks.push_back(std::move(block));
}

}  // namespace

Buffer Buffer::allocate(size_t bytes) {
  if (bytes >= kLarge) {
    LargeBlock block = take_block(bytes);
    const size_t whole = block.bytes;
    void* const data = block.memory.release();
    const auto release = [whole](void* memory) { give_back({decltype(LargeBlock::memory)(memory), whole}); };
    return {std::shared_ptr<void>(data, release), data, bytes};
  }
  constexpr std::align_val_t kAlignment{64};
  void* const data = ::operator new(std::max<size_t>(bytes, 1), kAlignment);
  return {std::shared_ptr<void>(data, [](void* memory) { ::operator delete(memory, kAlignment); }), data, bytes};
}

Buffer Buffer::copy_of(ByteView bytes) {
  Buffer copy = allocate(bytes.size());
  if (!bytes.empty()) std::memcpy(copy.data(), bytes.data(), bytes.size());
  return copy;
}

}  // namespace muster::rpc
