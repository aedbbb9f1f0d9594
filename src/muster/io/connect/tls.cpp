#include "muster/io/connect/tls.h"

#include <fmt/format.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509_vfy.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "muster/io/connect/openssl.h"
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

Result<std::shared_ptr<SSL_CTX>> new_context(int min_version) {
  keep_openssl();
  ERR_clear_error();
  std::shared_ptr<SSL_CTX> context(SSL_CTX_new(TLS_method()), SSL_CTX_free);
  if (!context) return fail(ErrorCode::kInternal, fmt::format("cannot set TLS up: {}", openssl_reason()));
  SSL_CTX_set_min_proto_version(context.get(), min_version);
  SSL_CTX_set_mode(context.get(), SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_default_passwd_cb(context.get(), no_password);
  return context;
}

Result<> use_certificate(SSL_CTX* context, const TlsFiles& files) {
  const std::string &certificate = files.certificate_file, &key = files.key_file;
  MUSTER_TRY(check_readable("certificate", certificate));
  MUSTER_TRY(check_readable("key", key));
  MUSTER_TRY(
      check_loaded(SSL_CTX_use_certificate_chain_file(context, certificate.c_str()), "certificate", certificate));
  MUSTER_TRY(check_loaded(SSL_CTX_use_PrivateKey_file(context, key.c_str(), SSL_FILETYPE_PEM), "key", key));
  return check_loaded(SSL_CTX_check_private_key(context), "key", key);
}

Result<> use_ca(SSL_CTX* context, const std::string& file) {
  MUSTER_TRY(check_readable("CA", file));
  return check_loaded(SSL_CTX_load_verify_locations(context, file.c_str(), nullptr), "CA", file);
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

Result<std::shared_ptr<TlsContext>> TlsContext::load(const TlsFiles& files) {
  MUSTER_ASSIGN(const std::shared_ptr<SSL_CTX> context, new_context(TLS1_3_VERSION));
  SSL_CTX* raw = context.get();
  SSL_CTX_set_verify(raw, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  SSL_CTX_set_session_cache_mode(raw, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(raw, 0);  // no session is resumed, and a server sends nothing before its client has
  MUSTER_TRY(use_certificate(raw, files));
  MUSTER_TRY(use_ca(raw, files.ca_file));
  return std::make_shared<TlsContext>(context);
}

Result<std::shared_ptr<TlsContext>> TlsContext::load_client(const TlsFiles& files) {
  if (files.certificate_file.empty() != files.key_file.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "a TLS certificate and its key go together, and only one of them is given");
  }
  MUSTER_ASSIGN(const std::shared_ptr<SSL_CTX> context, new_context(TLS1_2_VERSION));
  SSL_CTX* raw = context.get();
  SSL_CTX_set_verify(raw, SSL_VERIFY_PEER, nullptr);
  if (!files.certificate_file.empty()) MUSTER_TRY(use_certificate(raw, files));
  if (!files.ca_file.empty()) {
    MUSTER_TRY(use_ca(raw, files.ca_file));
  } else {
    MUSTER_TRY(check_loaded(SSL_CTX_set_default_verify_paths(raw), "CA", "of this system"));
  }
  return std::make_shared<TlsContext>(context);
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

Result<std::unique_ptr<Stream>> TlsContext::wrap_client(Fd socket, const std::string& host) const {
  std::unique_ptr<SSL, decltype(&SSL_free)> ssl(SSL_new(context_.get()), SSL_free);
  if (!ssl) return fail(ErrorCode::kResourceExhausted, fmt::format("cannot begin TLS: {}", openssl_reason()));
  const bool is_address = X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl.get()), host.c_str()) == 1;
  // A server with several certificates chooses one by the name.
  if (!is_address &&
      (SSL_set1_host(ssl.get(), host.c_str()) != 1 || SSL_set_tlsext_host_name(ssl.get(), host.c_str()) != 1)) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("TLS cannot use the host name '{}'", host));
  }
  ERR_clear_error();
  SSL_set_connect_state(ssl.get());
  return tls_stream(ssl.release(), std::move(socket));
}

}  // namespace muster
