#pragma once

#include <functional>
#include <type_traits>

#include "muster/base/error.h"

namespace muster {

/// Runs a program and returns its exit status: 0, or 1 after an Error or an exception. Without it, an exception ends
/// the program by std::terminate(), which says little.
///
///   int main() { return muster::run_main([] { train(muster::join_job()); }); }
///
/// A failure is printed to standard error as "error: rank 2: ...", without the rank if RANK is not set. It is also
/// written to the file TORCHELASTIC_ERROR_FILE, with the stack that libtorch's exceptions have, so that the launcher's
/// report and the job's error file show it.
int run_main(const std::function<Result<>()>& body);

/// The same for a body without a result.
template <class Body, class = std::enable_if_t<std::is_void_v<std::invoke_result_t<Body&>>>>
int run_main(Body body) {
  return run_main(std::function<Result<>()>([&body]() -> Result<> {
    body();
    return {};
  }));
}

}  // namespace muster
