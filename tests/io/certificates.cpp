#include "io/certificates.h"

#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "muster/base/check.h"

namespace muster {
namespace {

template <class Write>
void write_pem(const std::string& path, Write write) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  MUSTER_CHECK(file != nullptr && write(file) == 1 && std::fclose(file) == 0, "cannot write " + path);
}

}  // namespace

TestAuthority::TestAuthority(const std::string& name) {
  char folder[] = "/tmp/muster-test-XXXXXX";
  MUSTER_CHECK(mkdtemp(folder) != nullptr, "mkdtemp failed");
  folder_ = folder;
  key_.reset(EVP_EC_gen("P-256"));
  certificate_ = sign(name, key_.get(), nullptr, false);
  write_pem(ca_file(), [&](std::FILE* file) { return PEM_write_X509(file, certificate_.get()); });
}

TestAuthority::~TestAuthority() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

TestAuthority::Certificate TestAuthority::sign(const std::string& name, EVP_PKEY* subject, X509* issuer, bool expired) {
  Certificate made(X509_new());
  X509* raw = made.get();
  X509_set_version(raw, X509_VERSION_3);
  static std::atomic<long> serial = 0;  // ranks in threads make certificates
  ASN1_INTEGER_set(X509_get_serialNumber(raw), ++serial);
  X509_gmtime_adj(X509_getm_notBefore(raw), -2 * 86400);
  X509_gmtime_adj(X509_getm_notAfter(raw), expired ? -86400 : 86400);
  X509_set_pubkey(raw, subject);
  X509_NAME* subject_name = X509_get_subject_name(raw);
  X509_NAME_add_entry_by_txt(subject_name, "CN", MBSTRING_UTF8, reinterpret_cast<const unsigned char*>(name.c_str()),
                             -1, -1, 0);
  X509_set_issuer_name(raw, issuer != nullptr ? X509_get_subject_name(issuer) : subject_name);
  if (issuer == nullptr) {
    X509_EXTENSION* is_ca = X509V3_EXT_conf_nid(nullptr, nullptr, NID_basic_constraints, "critical,CA:TRUE");
    X509_add_ext(raw, is_ca, -1);
    X509_EXTENSION_free(is_ca);
  }
  MUSTER_CHECK(X509_sign(raw, key_.get(), EVP_sha256()) > 0, "cannot sign a certificate");
  return made;
}

TlsFiles TestAuthority::issue(const std::string& name, bool expired) {
  const Key key(EVP_EC_gen("P-256"));
  const Certificate certificate = sign(name, key.get(), certificate_.get(), expired);
  TlsFiles files{folder_ + "/" + name + ".pem", folder_ + "/" + name + ".key", ca_file()};
  write_pem(files.certificate_file, [&](std::FILE* file) { return PEM_write_X509(file, certificate.get()); });
  write_pem(files.key_file, [&](std::FILE* file) {
    return PEM_write_PrivateKey(file, key.get(), nullptr, nullptr, 0, nullptr, nullptr);
  });
  return files;
}

}  // namespace muster
