#include "muster/io/connect/tls.h"

#include <fmt/format.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "muster/io/connect/tls_stream.h"

namespace muster {
namespace {

std::string openssl_reason() {
  const char* text = ERR_reason_error_string(ERR_peek_error());
  ERR_clear_error();
  return text == nullptr ? "no reason given" : text;
}

Result<> check_readable(const char* what, const std::string& file) {
  if (access(file.c_str(), R_OK) == 0) return {};
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("cannot read the TLS {} '{}': {}", what, file, std::strerror(errno)));
}

Result<> check_loaded(int result, const char* what, const std::string& file) {
  if (result == 1) return {};
  return fail(ErrorCode::kInvalidArgument, fmt::format("cannot use the TLS {} '{}': {}", what, file, openssl_reason()));
}

// Without this, OpenSSL asks for the password on the terminal.
int no_password(char*, int, int, void*) { return 0; }

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

Result<std::shared_ptr<TlsContext>> TlsContext::load(const TlsFiles& files) {
  MUSTER_TRY(check_readable("certificate", files.certificate_file));
  MUSTER_TRY(check_readable("key", files.key_file));
  MUSTER_TRY(check_readable("CA", files.ca_file));
  ERR_clear_error();
  std::shared_ptr<SSL_CTX> context(SSL_CTX_new(TLS_method()), SSL_CTX_free);
  if (!context) return fail(ErrorCode::kInternal, fmt::format("cannot set TLS up: {}", openssl_reason()));
  SSL_CTX* raw = context.get();
  SSL_CTX_set_min_proto_version(raw, TLS1_3_VERSION);
  SSL_CTX_set_verify(raw, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  SSL_CTX_set_session_cache_mode(raw, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(raw, 0);  // no session is resumed, and a server sends nothing before its client has
  SSL_CTX_set_mode(raw, SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_default_passwd_cb(raw, no_password);
  MUSTER_TRY(check_loaded(SSL_CTX_use_certificate_chain_file(raw, files.certificate_file.c_str()), "certificate",
                          files.certificate_file));
  MUSTER_TRY(
      check_loaded(SSL_CTX_use_PrivateKey_file(raw, files.key_file.c_str(), SSL_FILETYPE_PEM), "key", files.key_file));
  MUSTER_TRY(check_loaded(SSL_CTX_check_private_key(raw), "key", files.key_file));
  MUSTER_TRY(check_loaded(SSL_CTX_load_verify_locations(raw, files.ca_file.c_str(), nullptr), "CA", files.ca_file));
  return std::make_shared<TlsContext>(std::move(context));
}

Result<std::shared_ptr<TlsContext>> TlsContext::from_environment() {
  const TlsFiles files{environment("MUSTER_TLS_CERT"), environment("MUSTER_TLS_KEY"), environment("MUSTER_TLS_CA")};
  const int missing = files.certificate_file.empty() + files.key_file.empty() + files.ca_file.empty();
  if (missing == 3) return nullptr;
  if (missing > 0) {
    return fail(ErrorCode::kInvalidArgument,
                "TLS needs all of MUSTER_TLS_CERT, MUSTER_TLS_KEY and MUSTER_TLS_CA, and some are not set");
  }
  return load(files);
}

Result<std::unique_ptr<Stream>> TlsContext::wrap(Fd socket, Side side) const {
  SSL* const ssl = SSL_new(context_.get());
  if (ssl == nullptr) return fail(ErrorCode::kResourceExhausted, fmt::format("cannot begin TLS: {}", openssl_reason()));
  side == Side::kClient ? SSL_set_connect_state(ssl) : SSL_set_accept_state(ssl);
  return tls_stream(ssl, std::move(socket));
}

}  // namespace muster
