#pragma once

#include <memory>
#include <string>

#include "muster/io/connect/handshake.h"
#include "muster/io/stream.h"

struct ssl_ctx_st;

namespace muster {

/// Certificates for TLS 1.3. Each side shows a certificate that is signed by `ca_file`. Versions before 1.3 are
/// refused. Host names in certificates are not compared with anything, because jobs use addresses. Every holder of a
/// certificate of this CA is accepted, so give each job (or each group of users) its own CA. A certificate that limits
/// its use must allow the use for client and server.
struct TlsFiles {
  std::string certificate_file;  ///< PEM chain
  std::string key_file;          ///< PEM
  std::string ca_file;           ///< PEM
};

/// Loaded certificates, shared by the connections of a process. Thread-safe once loaded.
class TlsContext {
 public:
  /// A file that cannot be used is kInvalidArgument, with its name and OpenSSL's reason.
  static Result<std::shared_ptr<TlsContext>> load(const TlsFiles& files);
  /// From MUSTER_TLS_CERT, MUSTER_TLS_KEY and MUSTER_TLS_CA; a null pointer when none of them is set,
  /// kInvalidArgument when only some are.
  static Result<std::shared_ptr<TlsContext>> from_environment();
  /// For clients of servers that are not muster's, over TLS 1.2 or newer. The server's certificate must be signed by
  /// `ca_file`, or by an authority that this system trusts if there is none. The client's certificate is optional.
  static Result<std::shared_ptr<TlsContext>> load_client(const TlsFiles& files);
  explicit TlsContext(std::shared_ptr<ssl_ctx_st> context) : context_(std::move(context)) {}

  using Side = Handshake::Side;
  /// Wraps a connected socket. The TLS handshake runs inside read() and write(), which return 0 meanwhile. The client
  /// begins it with its first call of either; wants_write() tells what to watch the socket for. If either side refuses
  /// a certificate, the error is kAuthentication with OpenSSL's reason. A peer that does not speak TLS is kProtocol.
  Result<std::unique_ptr<Stream>> wrap(Fd socket, Side side) const;
  /// The client's side of a connection to a server whose certificate must be for `host`, a name or an address.
  Result<std::unique_ptr<Stream>> wrap_client(Fd socket, const std::string& host) const;

 private:
  std::shared_ptr<ssl_ctx_st> context_;
};

}  // namespace muster
