#include "io/yields.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace {

std::atomic<long> count = 0;
std::atomic<int64_t> each_takes = 0;

}  // namespace

extern "C" int sched_yield() noexcept {
  ++count;
  if (const int64_t time = each_takes; time > 0) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(time);
    while (std::chrono::steady_clock::now() < end) {
    }
    return 0;
  }
  return static_cast<int>(syscall(SYS_sched_yield));
}

namespace muster::test {

long yields() { return count; }
void set_yield_time(std::chrono::nanoseconds time) { each_takes = time.count(); }

}  // namespace muster::test
