#pragma once

#include <openssl/crypto.h>

namespace muster {

/// Keeps OpenSSL's state until the process is gone. Its clean-up at the exit of a process races with threads that end
/// at that time, such as those of torch's backward passes on a device, and crashes them. Call it before OpenSSL is
/// used.
inline void keep_openssl() {
  static const int kept = OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
  static_cast<void>(kept);
}

}  // namespace muster
