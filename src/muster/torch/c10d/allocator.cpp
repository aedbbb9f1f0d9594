#include "muster/torch/c10d/allocator.h"

#include <cstring>
#include <utility>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

namespace muster {
namespace {

struct Block {
  std::shared_ptr<Arena> arena;
  void* data;
};

void release(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  block->arena->free(block->data);
}

class ArenaAllocator final : public c10::Allocator {
 public:
  explicit ArenaAllocator(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}

  c10::DataPtr allocate(size_t bytes) override {
    const Result<void*> data = arena_->allocate(bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, data.has_value(), data.error().to_string());
    return {*data, new Block{arena_, *data}, &release, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  std::shared_ptr<Arena> arena_;
};

}  // namespace

std::shared_ptr<c10::Allocator> arena_allocator(std::shared_ptr<Arena> arena) {
  return std::make_shared<ArenaAllocator>(std::move(arena));
}

at::Tensor empty_in(const std::shared_ptr<Arena>& arena, int64_t size, const at::TensorOptions& options) {
  const auto bytes = static_cast<size_t>(size) * options.dtype().itemsize();
  const Result<void*> data = arena->allocate(bytes);
  TORCH_CHECK_WITH(OutOfMemoryError, data.has_value(), data.error().to_string());
  return at::from_blob(
      *data, {size}, [arena](void* memory) { arena->free(memory); }, options.device(at::kCPU));
}

}  // namespace muster
