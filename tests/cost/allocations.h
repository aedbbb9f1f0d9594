#pragma once

#include <cstdint>

// AddressSanitizer and ThreadSanitizer have an allocator of their own, and make system calls when they like.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MUSTER_SANITIZED 1
#elif defined(__has_feature)
#define MUSTER_SANITIZED (__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#else
#define MUSTER_SANITIZED 0
#endif

namespace muster::cost {

/// Calls of malloc and its kin in this process so far, `new` included. Never any where MUSTER_SANITIZED.
uint64_t allocations();

}  // namespace muster::cost
