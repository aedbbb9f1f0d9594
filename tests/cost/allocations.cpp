// Replaces glibc's malloc in this program and counts its calls.
#include "cost/allocations.h"

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>

namespace muster::cost {
namespace {
std::atomic<uint64_t> calls{0};
}
uint64_t allocations() { return calls.load(std::memory_order_relaxed); }
}  // namespace muster::cost

#if defined(__GLIBC__) && !MUSTER_SANITIZED
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* memory, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
}

namespace {
void* counted(void* memory) {
  muster::cost::calls.fetch_add(1, std::memory_order_relaxed);
  return memory;
}
}  // namespace

extern "C" {
void* malloc(size_t bytes) { return counted(__libc_malloc(bytes)); }
void* calloc(size_t count, size_t bytes) { return counted(__libc_calloc(count, bytes)); }
void* realloc(void* memory, size_t bytes) { return counted(__libc_realloc(memory, bytes)); }
void* memalign(size_t alignment, size_t bytes) { return counted(__libc_memalign(alignment, bytes)); }
void* aligned_alloc(size_t alignment, size_t bytes) { return counted(__libc_memalign(alignment, bytes)); }
int posix_memalign(void** memory, size_t alignment, size_t bytes) {
  *memory = counted(__libc_memalign(alignment, bytes));
  return *memory == nullptr ? ENOMEM : 0;
}
}
#endif
