#pragma once

#include <cstdint>

// AddressSanitizer and ThreadSanitizer have their own allocator and make their own system calls.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MUSTER_SANITIZED 1
#elif defined(__has_feature)
#define MUSTER_SANITIZED (__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#else
#define MUSTER_SANITIZED 0
#endif

namespace muster::cost {

/// The number of calls of malloc and similar functions in this process so far, including `new`. Always zero if
/// MUSTER_SANITIZED is set.
uint64_t allocations();

}  // namespace muster::cost
