#include "muster/base/check.h"

#include <cstdio>
#include <cstdlib>

namespace muster {

void check_failed(const char* expression, const char* file, int line, const std::string& message) {
  std::fprintf(stderr, "muster: %s:%d: check failed: %s: %s\n", file, line, expression, message.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace muster
