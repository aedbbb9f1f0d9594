#pragma once

#include <openssl/evp.h>
#include <openssl/x509.h>

#include <memory>
#include <string>

#include "muster/io/connect/tls.h"

namespace muster {

/// A certificate authority and its certificates, in a temporary directory that the destructor removes.
class TestAuthority {
 public:
  explicit TestAuthority(const std::string& name = "muster test authority");
  ~TestAuthority();
  TestAuthority(const TestAuthority&) = delete;

  /// Signs a certificate for `name`. It is valid for one day from now, or expired yesterday if `expired` is set.
  TlsFiles issue(const std::string& name, bool expired = false);
  std::string ca_file() const { return folder_ + "/ca.pem"; }
  const std::string& folder() const { return folder_; }

 private:
  struct Free {
    void operator()(X509* certificate) const { X509_free(certificate); }
    void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
  };
  using Certificate = std::unique_ptr<X509, Free>;
  using Key = std::unique_ptr<EVP_PKEY, Free>;
  Certificate sign(const std::string& name, EVP_PKEY* subject, X509* issuer, bool expired);

  std::string folder_;
  Key key_;
  Certificate certificate_;
};

}  // namespace muster
