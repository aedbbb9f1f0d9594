#include "muster/launch/workers/warm.h"

#include <openssl/evp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "muster/base/check.h"
#include "muster/io/socket.h"
#include "muster/launch/private_directories.h"
#include "muster/launch/workers/zygote_program.h"

namespace muster {
namespace {

constexpr size_t kDigestDigits = 24;

// The interpreter, the linker, the C library or the libraries of torch read these variables when they start.
// OMP_NUM_THREADS is not included, because workers set it. torchrun's variables are not included, because they differ
// between runs.
constexpr std::array kReadAtStart = {
    "PYTHON", "LD_",  "OMP_",  "GOMP_",  "KMP_",    "MKL_",   "OPENBLAS_",   "BLIS_", "TORCH",     "PYTORCH", "CUDA_",
    "NVIDIA", "HIP_", "ROCR_", "GLIBC_", "MALLOC_", "LANG",   "LC_",         "TZ",    "NUMPY_",    "NPY_",    "HOME",
    "HF_",    "XLA_", "ASAN_", "TSAN_",  "LSAN_",   "UBSAN_", "VIRTUAL_ENV", "ATEN_", "COVERAGE_", "COV_"};

bool matters_at_start(const std::string& name) {
  if (name == "OMP_NUM_THREADS" || name == "PYTHONUNBUFFERED" || name.starts_with("TORCHELASTIC_")) return false;
  for (const std::string_view prefix : kReadAtStart)
    if (name.starts_with(prefix)) return true;
  return false;
}

}  // namespace

std::string warm_digest(const WarmKey& key) {
  std::string text = key.python + '\0' + zygote_text() + '\0';
  for (const auto& module : key.preload) text += module + '\0';
  for (const auto& [name, value] : key.environment)
    if (matters_at_start(name)) text += '\0' + name + "=" + value;
  std::array<uint8_t, EVP_MAX_MD_SIZE> digest{};
  unsigned length = 0;
  MUSTER_CHECK(EVP_Digest(text.data(), text.size(), digest.data(), &length, EVP_sha256(), nullptr) == 1, "no SHA-256");
  return to_hex(Bytes(digest.begin(), digest.begin() + length)).substr(0, kDigestDigits);
}

Result<std::string> warm_path(const WarmKey& key) {
  MUSTER_ASSIGN(const std::string directory, user_directory(key.environment, /*create=*/false));
  return directory + "/warm-" + warm_digest(key);
}

Result<Fd> connect_warm(const std::string& path) {
  MUSTER_ASSIGN(const Address address, socket_at(path));
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return fail_errno(errno, "cannot make a socket");
  if (::connect(socket.get(), address.raw(), address.raw_length()) != 0)
    return fail(ErrorCode::kNotFound, "no process listens at " + path);
  MUSTER_ASSIGN(const UnixPeer peer, unix_peer(socket.get()));
  if (peer.uid != ::geteuid()) return fail(ErrorCode::kAuthentication, path + " is served by another user");
  return socket;
}

}  // namespace muster
