#pragma once

#include <memory>
#include <string>

#include "muster/io/stream.h"

namespace muster {

/// Certificates for TLS 1.3. Both sides show one, signed by `ca_file`; anything older than 1.3 is refused.
struct TlsFiles {
  std::string certificate_file;  ///< PEM chain
  std::string key_file;          ///< PEM
  std::string ca_file;           ///< PEM
};

/// Loaded certificates, shared by the connections of a process. Thread-safe once loaded.
class TlsContext {
 public:
  static Result<std::shared_ptr<TlsContext>> load(const TlsFiles& files);
  /// From MUSTER_TLS_CERT, MUSTER_TLS_KEY and MUSTER_TLS_CA; a null pointer when none of them is set.
  static Result<std::shared_ptr<TlsContext>> from_environment();
  virtual ~TlsContext() = default;

  enum class Side { kClient, kServer };
  /// Wraps a connected socket. The TLS handshake goes on inside read() and write(), which report 0 meanwhile;
  /// `wants_write()` of the stream's socket is then EPOLLIN | EPOLLOUT's business of the caller.
  virtual Result<std::unique_ptr<Stream>> wrap(Fd socket, Side side) = 0;
};

}  // namespace muster
