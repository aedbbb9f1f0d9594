#pragma once

#include <sys/uio.h>

#include <memory>
#include <span>

#include "muster/base/bytes.h"
#include "muster/io/fd.h"

namespace muster {

/// A connected, non-blocking byte stream: a plain socket, or TLS over one.
class Stream {
 public:
  /// The usual size of a buffer for read().
  static constexpr size_t kReadBytes = 64 << 10;

  virtual ~Stream() = default;

  /// Bytes moved; 0 means "would block". A peer that has closed is kPeerLost. Never raises SIGPIPE. After a write that
  /// moved fewer bytes than offered, the next one must begin with the bytes left over: TLS may have encrypted them
  /// already.
  virtual Result<size_t> read(std::span<const iovec> into) = 0;
  virtual Result<size_t> write(std::span<const iovec> from) = 0;
  /// The same for one piece.
  Result<size_t> read(MutableByteView into) {
    const iovec piece{into.data(), into.size()};
    return read(std::span(&piece, 1));
  }
  Result<size_t> write(ByteView from) {
    const iovec piece{const_cast<uint8_t*>(from.data()), from.size()};  // it is only read
    return write(std::span(&piece, 1));
  }
  /// True if the last read() or write() stopped because the socket was full. To drive a stream: on every event, read()
  /// until 0 and write() until 0, then watch EPOLLIN, and EPOLLOUT if wants_write(). (Watching EPOLLOUT whenever bytes
  /// are pending would spin while a TLS handshake waits for the peer.)
  virtual bool wants_write() const = 0;
  /// The socket, to be watched by a Loop.
  virtual int fd() const = 0;
  /// True if TLS holds decrypted bytes. epoll does not report them, so the caller must read until read() returns 0.
  virtual bool has_buffered() const { return false; }
  /// True if a read() that does not fill its buffers has read all bytes that were there.
  virtual bool short_read_is_last() const { return false; }
};

std::unique_ptr<Stream> plain_stream(Fd socket);

}  // namespace muster
