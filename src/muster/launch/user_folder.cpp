#include "muster/launch/user_folder.h"

#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>

namespace muster {
namespace {
constexpr size_t kLongestName = 32;  // of a socket
}

Result<std::string> user_folder(const Environment& environment) {
  const auto runtime = environment.find("XDG_RUNTIME_DIR");
  constexpr size_t kLongest = sizeof(sockaddr_un::sun_path) - std::string_view("/muster/").size() - kLongestName - 1;
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

Result<Address> socket_at(const std::string& path) { return Address::parse("unix:" + path); }

}  // namespace muster
