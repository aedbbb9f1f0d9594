#include "muster/nccl/library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include "muster/base/environment.h"

namespace muster::nccl {
namespace {

constexpr const char* kName = "libnccl.so.2";
constexpr int kMinVersion = 22100;

std::string version_name(int code) { return fmt::format("{}.{}.{}", code / 10000, code / 100 % 100, code % 100); }

}  // namespace

Result<const Library*> Library::get() {
  static const Result<Library> loaded = []() -> Result<Library> {
    const std::string file(is_set("MUSTER_NCCL_LIBRARY") ? environment("MUSTER_NCCL_LIBRARY") : kName);
    void* opened = dlopen(file.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (opened == nullptr) opened = dlopen(file.c_str(), RTLD_NOW);
    if (opened == nullptr) {
      return fail(ErrorCode::kUnavailable,
                  fmt::format("NCCL cannot be loaded: {}; install it (pip install nvidia-nccl-cu12), or set "
                              "MUSTER_NCCL_LIBRARY to the path of {}",
                              dlerror(), kName));
    }
    Library library;
    MUSTER_TRY(library.load(file, opened));
    return library;
  }();
  if (!loaded) return tl::unexpected(loaded.error());
  return &*loaded;
}

Result<> Library::load(const std::string& file, void* loaded) {
  GetVersion = reinterpret_cast<decltype(GetVersion)>(dlsym(loaded, "ncclGetVersion"));
  int code = 0;
  if (GetVersion == nullptr || GetVersion(&code) != kSuccess) {
    return fail(ErrorCode::kUnsupported, fmt::format("{} is not NCCL: it has no version", file));
  }
  if (code < kMinVersion) {
    return fail(ErrorCode::kUnsupported, fmt::format("{} is NCCL {}; muster needs {} or newer", file,
                                                     version_name(code), version_name(kMinVersion)));
  }
  version_ = fmt::format("NCCL {}, {}", version_name(code), file);
  std::string missing;
#define MUSTER_NCCL_FUNCTION(name)                                      \
  name = reinterpret_cast<decltype(name)>(dlsym(loaded, "nccl" #name)); \
  if (name == nullptr && missing.empty()) missing = "nccl" #name;
  MUSTER_NCCL_FUNCTION(GetUniqueId)
  MUSTER_NCCL_FUNCTION(GetErrorString)
  MUSTER_NCCL_FUNCTION(GetLastError)
  MUSTER_NCCL_FUNCTION(CommInitRankConfig)
  MUSTER_NCCL_FUNCTION(CommGetAsyncError)
  MUSTER_NCCL_FUNCTION(CommFinalize)
  MUSTER_NCCL_FUNCTION(CommDestroy)
  MUSTER_NCCL_FUNCTION(CommAbort)
  MUSTER_NCCL_FUNCTION(GroupStart)
  MUSTER_NCCL_FUNCTION(GroupEnd)
  MUSTER_NCCL_FUNCTION(AllReduce)
  MUSTER_NCCL_FUNCTION(Reduce)
  MUSTER_NCCL_FUNCTION(Broadcast)
  MUSTER_NCCL_FUNCTION(AllGather)
  MUSTER_NCCL_FUNCTION(ReduceScatter)
  MUSTER_NCCL_FUNCTION(Send)
  MUSTER_NCCL_FUNCTION(Recv)
  MUSTER_NCCL_FUNCTION(RedOpCreatePreMulSum)
  MUSTER_NCCL_FUNCTION(RedOpDestroy)
#undef MUSTER_NCCL_FUNCTION
  CommInitRankScalable =  // since 2.23
      reinterpret_cast<decltype(CommInitRankScalable)>(dlsym(loaded, "ncclCommInitRankScalable"));
  if (missing.empty()) return {};
  return fail(ErrorCode::kUnsupported, fmt::format("{} has no {}", version_, missing));
}

Result<> Library::check(int code, const char* call, Comm comm) const {
  if (code == kSuccess || code == kInProgress) return {};
  const char* const last = GetLastError(comm);
  const std::string detail = last == nullptr || *last == '\0' ? "" : fmt::format(": {}", last);
  return fail(ErrorCode::kIo, fmt::format("{} failed: {}{}", call, GetErrorString(code), detail));
}

}  // namespace muster::nccl
