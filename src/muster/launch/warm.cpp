#include "muster/launch/warm.h"

#include <openssl/evp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "muster/base/check.h"
#include "muster/io/socket.h"
#include "muster/launch/zygote_program.h"

namespace muster {
namespace {

constexpr size_t kDigestDigits = 24;

// Read by the interpreter, the linker, the C library or the libraries of torch when they start. OMP_NUM_THREADS is
// left out: workers set it. So are torchrun's variables, which differ from run to run.
constexpr std::array kReadAtStart = {
    "PYTHON", "LD_",    "OMP_", "GOMP_", "KMP_",   "MKL_",    "OPENBLAS_", "BLIS_",  "TORCH",      "PYTORCH",
    "CUDA_",  "NVIDIA", "HIP_", "ROCR_", "GLIBC_", "MALLOC_", "LANG",      "LC_",    "TZ",         "NUMPY_",
    "NPY_",   "HOME",   "HF_",  "XLA_",  "ASAN_",  "TSAN_",   "LSAN_",     "UBSAN_", "VIRTUAL_ENV"};

bool counts(const std::string& name) {
  if (name == "OMP_NUM_THREADS" || name == "PYTHONUNBUFFERED" || name.starts_with("TORCHELASTIC_")) return false;
  for (const std::string_view prefix : kReadAtStart)
    if (name.starts_with(prefix)) return true;
  return false;
}

}  // namespace

std::string warm_digest(const WarmKind& kind) {
  std::string text = kind.python + '\0' + zygote_text() + '\0';
  for (const auto& module : kind.preload) text += module + '\0';
  for (const auto& [name, value] : kind.environment)
    if (counts(name)) text += '\0' + name + "=" + value;
  std::array<uint8_t, EVP_MAX_MD_SIZE> digest{};
  unsigned length = 0;
  MUSTER_CHECK(EVP_Digest(text.data(), text.size(), digest.data(), &length, EVP_sha256(), nullptr) == 1, "no SHA-256");
  return to_hex(Bytes(digest.begin(), digest.begin() + length)).substr(0, kDigestDigits);
}

Result<std::string> warm_folder(const Environment& environment) {
  const auto runtime = environment.find("XDG_RUNTIME_DIR");
  // A socket's path must be short.
  constexpr size_t kLongest =
      sizeof(sockaddr_un::sun_path) - std::string_view("/muster/warm-").size() - kDigestDigits - 1;
  const bool has_runtime = runtime != environment.end() && runtime->second.size() <= kLongest &&
                           ::access(runtime->second.c_str(), W_OK) == 0;
  std::string folder = has_runtime ? runtime->second + "/muster" : "/tmp/muster-" + std::to_string(::geteuid());
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return fail_errno(errno, "cannot make " + folder);
  struct stat info {};
  if (::lstat(folder.c_str(), &info) != 0) return fail_errno(errno, "cannot look at " + folder);
  if (!S_ISDIR(info.st_mode) || info.st_uid != ::geteuid() || (info.st_mode & 077) != 0)
    return fail(ErrorCode::kUnavailable,
                folder + " is not a folder of this user's alone: remove it, or name another by XDG_RUNTIME_DIR");
  return folder;
}

Result<Fd> connect_warm(const WarmKind& kind) {
  MUSTER_ASSIGN(const std::string folder, warm_folder(kind.environment));
  return connect_warm_at(folder + "/warm-" + warm_digest(kind));
}

Result<Fd> connect_warm_at(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return fail(ErrorCode::kNotFound, path + " is too long for a socket");
  std::memcpy(address.sun_path, path.data(), path.size());
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return fail_errno(errno, "cannot make a socket");
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0)
    return fail(ErrorCode::kNotFound, "nobody listens at " + path);
  MUSTER_ASSIGN(const UnixPeer peer, unix_peer(socket.get()));
  if (peer.uid != ::geteuid()) return fail(ErrorCode::kAuthentication, path + " is served by another user");
  return socket;
}

}  // namespace muster
