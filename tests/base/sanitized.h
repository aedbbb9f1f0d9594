#pragma once

/// 1 under AddressSanitizer and ThreadSanitizer, which have their own allocator and make their own system calls.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MUSTER_SANITIZED 1
#elif defined(__has_feature)
#define MUSTER_SANITIZED (__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#else
#define MUSTER_SANITIZED 0
#endif
