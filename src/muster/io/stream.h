#pragma once

#include <sys/uio.h>

#include <memory>
#include <span>

#include "muster/base/error.h"
#include "muster/io/fd.h"

namespace muster {

/// A connected, non-blocking byte stream: a plain socket, or TLS over one.
class Stream {
 public:
  virtual ~Stream() = default;

  /// Bytes moved; 0 means "would block". A peer that has closed is kPeerLost. Never raises SIGPIPE.
  virtual Result<size_t> read(std::span<const iovec> into) = 0;
  virtual Result<size_t> write(std::span<const iovec> from) = 0;
  /// The socket, to be watched by a Loop.
  virtual int fd() const = 0;
  /// TLS may hold decrypted bytes that epoll cannot see: read until it would block.
  virtual bool has_buffered() const { return false; }
};

std::unique_ptr<Stream> plain_stream(Fd socket);

}  // namespace muster
