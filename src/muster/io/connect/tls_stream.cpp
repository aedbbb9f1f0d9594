#include "muster/io/connect/tls_stream.h"

#include <fmt/format.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/x509_vfy.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>

#include "muster/base/bytes.h"
#include "muster/base/check.h"

namespace muster {
namespace {

constexpr size_t kRecord = 16 << 10;  // the largest payload of a TLS record

/// The socket that OpenSSL reads and writes. A BIO of our own, because BIO_s_socket would raise SIGPIPE.
struct Wire {
  Fd socket;
  int error = 0;  ///< errno of the last failure
  bool ended = false;
};

Wire& wire_of(BIO* bio) { return *static_cast<Wire*>(BIO_get_data(bio)); }

int wire_write(BIO* bio, const char* data, int size) {
  auto& wire = wire_of(bio);
  BIO_clear_retry_flags(bio);
  const ssize_t n = send(wire.socket.get(), data, static_cast<size_t>(size), MSG_NOSIGNAL);
  if (n >= 0) return static_cast<int>(n);
  wire.error = errno;
  if (errno == EAGAIN || errno == EINTR) BIO_set_retry_write(bio);
  return -1;
}

int wire_read(BIO* bio, char* data, int size) {
  auto& wire = wire_of(bio);
  BIO_clear_retry_flags(bio);
  const ssize_t n = recv(wire.socket.get(), data, static_cast<size_t>(size), 0);
  if (n == 0) wire.ended = true;
  if (n >= 0) return static_cast<int>(n);
  wire.error = errno;
  if (errno == EAGAIN || errno == EINTR) BIO_set_retry_read(bio);
  return -1;
}

long wire_control(BIO* bio, int command, long, void*) {
  if (command == BIO_CTRL_EOF) return wire_of(bio).ended;
  return command == BIO_CTRL_FLUSH;
}

const BIO_METHOD* wire_method() {
  static const BIO_METHOD* const method = [] {
    BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "muster socket");
    MUSTER_CHECK(made != nullptr, "OpenSSL has no memory");
    BIO_meth_set_write(made, wire_write);
    BIO_meth_set_read(made, wire_read);
    BIO_meth_set_ctrl(made, wire_control);
    return made;
  }();
  return method;
}

/// Up to `limit` bytes of `segments`, from `skip` on.
Bytes gather(std::span<const iovec> segments, size_t skip, size_t limit) {
  Bytes bytes;
  for (const auto& segment : segments) {
    const size_t passed = std::min(skip, segment.iov_len);
    skip -= passed;
    const auto* begin = static_cast<const uint8_t*>(segment.iov_base) + passed;
    bytes.insert(bytes.end(), begin, begin + std::min(segment.iov_len - passed, limit - bytes.size()));
    if (bytes.size() == limit) break;
  }
  return bytes;
}

/// The alerts by which a peer says that it does not accept our certificate (RFC 8446, section 6.2).
bool is_certificate_alert(int reason) {
  static constexpr int kAlerts[] = {
      SSL_AD_BAD_CERTIFICATE,     SSL_AD_UNSUPPORTED_CERTIFICATE, SSL_AD_CERTIFICATE_REVOKED,
      SSL_AD_CERTIFICATE_EXPIRED, SSL_AD_CERTIFICATE_UNKNOWN,     SSL_AD_UNKNOWN_CA,
      SSL_AD_ACCESS_DENIED,       SSL_AD_DECRYPT_ERROR,           SSL_AD_CERTIFICATE_REQUIRED};
  return std::ranges::find(kAlerts, reason - SSL_AD_REASON_OFFSET) != std::end(kAlerts);
}

class TlsStream final : public Stream {
 public:
  TlsStream(SSL* ssl, Fd socket) : wire_{std::move(socket)}, ssl_(ssl, SSL_free) {
    BIO* bio = BIO_new(wire_method());
    MUSTER_CHECK(bio != nullptr, "OpenSSL has no memory");
    BIO_set_data(bio, &wire_);
    BIO_set_init(bio, 1);
    SSL_set_bio(ssl, bio, bio);  // ssl_ owns the BIO now
  }

  /// In a forked child only the descriptor is closed: a close_notify would end the session, which is the parent's.
  ~TlsStream() override {
    if (getpid() != process_ || failure_ || !SSL_is_init_finished(ssl_.get())) return;
    SSL_shutdown(ssl_.get());  // sends close_notify if the socket takes it at once
    ERR_clear_error();
  }

  Result<size_t> read(std::span<const iovec> into) override {
    if (failure_) return tl::unexpected(*failure_);
    read_wants_write_ = false;
    size_t total = 0;
    for (const auto& segment : into) {
      for (size_t filled = 0; filled < segment.iov_len;) {
        ERR_clear_error();
        size_t count = 0;
        const int result =
            SSL_read_ex(ssl_.get(), static_cast<char*>(segment.iov_base) + filled, segment.iov_len - filled, &count);
        if (result <= 0) {
          failure_ = problem(result, &read_wants_write_);
          if (failure_ && total == 0) return tl::unexpected(*failure_);
          return total;  // the next call returns the failure
        }
        filled += count;
        total += count;
      }
    }
    return total;
  }

  Result<size_t> write(std::span<const iovec> from) override {
    if (failure_) return tl::unexpected(*failure_);
    write_wants_write_ = false;
    size_t total = 0;
    while (true) {
      Bytes offered = gather(from, total, staged_.empty() ? kRecord : staged_.size());
      if (!staged_.empty() && offered != staged_) {
        return fail(ErrorCode::kInternal, "a write over TLS does not begin with the bytes that the last one left over");
      }
      if (offered.empty()) return total;
      staged_ = std::move(offered);
      ERR_clear_error();
      size_t count = 0;
      const int result = SSL_write_ex(ssl_.get(), staged_.data(), staged_.size(), &count);
      if (result <= 0) {
        failure_ = problem(result, &write_wants_write_);
        if (failure_ && total == 0) return tl::unexpected(*failure_);
        return total;
      }
      total += count;
      staged_.clear();
    }
  }

  bool wants_write() const override { return read_wants_write_ || write_wants_write_; }
  int fd() const override { return wire_.socket.get(); }
  bool has_buffered() const override { return SSL_pending(ssl_.get()) > 0; }

 private:
  /// Examines a call that did not succeed. Returns an Error, or nothing if the call only has to wait for the socket.
  /// Sets `wants_write`.
  std::optional<Error> problem(int result, bool* wants_write) {
    const int kind = SSL_get_error(ssl_.get(), result);
    *wants_write = kind == SSL_ERROR_WANT_WRITE;
    if (kind == SSL_ERROR_WANT_WRITE || kind == SSL_ERROR_WANT_READ) return std::nullopt;
    Error error = describe(kind);
    ERR_clear_error();
    return error;
  }

  Error describe(int kind) {
    const bool in_handshake = !SSL_is_init_finished(ssl_.get());
    const unsigned long code = ERR_peek_error();
    const int reason = ERR_GET_REASON(code);
    if (kind == SSL_ERROR_ZERO_RETURN || wire_.ended || reason == SSL_R_UNEXPECTED_EOF_WHILE_READING) {
      return {ErrorCode::kPeerLost, in_handshake
                                        ? "the peer closed the connection during the TLS handshake (it may not use TLS)"
                                        : "the peer closed the connection"};
    }
    if (kind == SSL_ERROR_SYSCALL) return fail_errno(wire_.error, "TLS input or output failed").value();
    const char* text = ERR_reason_error_string(code);
    if (text == nullptr) text = "no reason given";
    if (const long verdict = SSL_get_verify_result(ssl_.get()); verdict != X509_V_OK) {
      return {ErrorCode::kAuthentication,
              fmt::format("the peer's certificate was refused: {}", X509_verify_cert_error_string(verdict))};
    }
    if (reason == SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE) {
      return {ErrorCode::kAuthentication, fmt::format("the peer showed no certificate: {}", text)};
    }
    if (is_certificate_alert(reason)) {
      return {ErrorCode::kAuthentication, fmt::format("the peer refused this process's certificate: {}", text)};
    }
    if (in_handshake) return describe_handshake(reason, text);
    return {ErrorCode::kProtocol, fmt::format("the peer broke the TLS protocol: {}", text)};
  }

  static Error describe_handshake(int reason, const char* text) {
    const bool too_old = reason == SSL_R_UNSUPPORTED_PROTOCOL || reason == SSL_R_TLSV1_ALERT_PROTOCOL_VERSION;
    const char* what = too_old ? "the peer's TLS version is too old" : "the peer does not speak TLS";
    return {ErrorCode::kProtocol, fmt::format("{}: {}", what, text)};
  }

  const pid_t process_ = getpid();
  Wire wire_;
  const std::unique_ptr<SSL, decltype(&SSL_free)> ssl_;
  bool read_wants_write_ = false;
  bool write_wants_write_ = false;
  std::optional<Error> failure_;
  Bytes staged_;  // offered to OpenSSL and not yet accepted; OpenSSL may have encrypted it
};

}  // namespace

std::unique_ptr<Stream> tls_stream(SSL* ssl, Fd socket) { return std::make_unique<TlsStream>(ssl, std::move(socket)); }

}  // namespace muster
