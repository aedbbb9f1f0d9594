#pragma once

#include <openssl/ssl.h>

#include <memory>
#include <optional>

#include "muster/base/bytes.h"
#include "muster/io/stream.h"

namespace muster {

/// TLS over a socket that it owns. Private to io.
class TlsStream final : public Stream {
 public:
  struct FreeSsl {
    void operator()(SSL* ssl) const { SSL_free(ssl); }
  };
  using Ssl = std::unique_ptr<SSL, FreeSsl>;

  /// `ssl` has its side set and no socket yet.
  TlsStream(Ssl ssl, Fd socket);
  ~TlsStream() override;

  Result<size_t> read(std::span<const iovec> into) override;
  Result<size_t> write(std::span<const iovec> from) override;
  bool wants_write() const override { return read_wants_write_ || write_wants_write_; }
  int fd() const override { return wire_.socket.get(); }
  bool has_buffered() const override { return SSL_pending(ssl_.get()) > 0; }

  /// The socket that OpenSSL reads and writes. A BIO of our own, because BIO_s_socket would raise SIGPIPE.
  struct Wire {
    Fd socket;
    int error = 0;  ///< errno of the last failure
    bool ended = false;
  };

 private:
  /// Examines a call that did not succeed. Returns an Error, or nothing if the call only has to wait for the socket.
  /// Sets `wants_write`.
  std::optional<Error> problem(int result, bool* wants_write);
  Error describe(int kind);
  Error describe_handshake(int reason, const char* text) const;

  Wire wire_;
  Ssl ssl_;
  bool read_wants_write_ = false;
  bool write_wants_write_ = false;
  std::optional<Error> failure_;
  Bytes staged_;  // offered to OpenSSL and not yet accepted; OpenSSL may have encrypted it
};

}  // namespace muster
