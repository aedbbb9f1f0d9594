#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <new>
#include <vector>

namespace muster::cost {

/// A T in memory that is shared with processes forked later.
template <class T>
class Shared {
 public:
  Shared() : value_(new (mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) T()) {}
  ~Shared() { munmap(value_, sizeof(T)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  T* operator->() const { return value_; }
  T& operator*() const { return *value_; }

 private:
  T* value_;
};

/// A count of system calls. Reading it makes no system call.
using Counter = std::atomic<uint64_t>;

/// Runs body(rank, calls) in `ranks` (at most 8) forked processes, and counts their system calls with ptrace, as strace
/// does. Returns the exit statuses of the processes. Empty if this process may not trace its children.
std::vector<int> run_traced(int ranks, const std::function<int(int rank, const Counter& calls)>& body);

}  // namespace muster::cost
