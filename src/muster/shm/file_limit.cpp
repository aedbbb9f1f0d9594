#include "muster/shm/file_limit.h"

#include <fmt/format.h>
#include <sys/resource.h>

namespace muster {

Result<> check_file_limit(size_t bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur) return {};
  return fail(ErrorCode::kResourceExhausted,
              fmt::format("{} bytes of shared memory are beyond this process's limit on file sizes, {}; raise it "
                          "(ulimit -f)",
                          bytes, limit.rlim_cur));
}

}  // namespace muster
