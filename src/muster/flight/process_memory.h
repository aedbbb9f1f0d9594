#pragma once

#include <sys/types.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/error.h"
#include "muster/flight/ticks.h"
#include "muster/io/fd.h"

// Memory in which a process notes what it does, for readers in other processes. It is a memfd, which a reader finds by
// its name in /proc/<pid>/fd. So the process may hang or be stopped. Readers check everything, because the memory
// belongs to another process and changes while they read.
namespace muster {

/// The first bytes of such memory.
struct ProcessMemoryHeader {
  uint64_t magic;  ///< the kind of the memory and the version of its layout; written last
  TickKind tick_kind;
  int32_t pid;
  Moment made;                ///< when this memory was made; a reader takes a second moment and computes the scale
  int64_t wall_clock_offset;  ///< ns to add to CLOCK_MONOTONIC for the time since 1970
  char host[64];              ///< truncated, and ends with a zero, like the text below
  char run_id[256];           ///< of the job of `muster run`; else empty
};

/// The writer's side: zeroed memory that is visible to readers once publish() was called.
class ProcessMemory {
 public:
  /// Empty if there is no memory: what is noted there is not worth an error.
  static std::optional<ProcessMemory> create(const char* name, size_t bytes);
  ProcessMemory(ProcessMemory&&) = default;
  ProcessMemory& operator=(ProcessMemory&&) = delete;

  uint8_t* data() const { return memory_.get(); }
  /// Fills in the header. The rest must be complete.
  void publish(uint64_t magic) const;

 private:
  struct Unmap {
    size_t bytes;
    void operator()(uint8_t* memory) const;
  };

  ProcessMemory(Fd fd, std::unique_ptr<uint8_t, Unmap> memory) : fd_(std::move(fd)), memory_(std::move(memory)) {}

  Fd fd_;  ///< kept open, because readers find the memory by it
  std::unique_ptr<uint8_t, Unmap> memory_;
};

template <size_t kSize>
void put_text(char (&to)[kSize], std::string_view text) {
  to[text.copy(to, kSize - 1)] = '\0';
}
template <size_t kSize>
std::string exact_text(const char (&from)[kSize]) {
  return {from, strnlen(from, kSize)};
}
/// Without control characters.
template <size_t kSize>
std::string text_of(const char (&from)[kSize]) {
  std::string text = exact_text(from);
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < ' ' || c == 0x7f; }, '?');
  return text;
}

/// What readers know of a process.
struct ProcessState {
  pid_t pid = 0;  ///< as its own process sees it
  std::string host;
  std::string run_id;             ///< of the job that `muster run` started; empty: none
  TimePoint taken;                ///< when it was read
  int64_t wall_clock_offset = 0;  ///< ns to add to steady_clock() for the time since 1970
  bool stopped = false;           ///< by a signal or a debugger

  /// True if it belongs to the job of that name. The memory holds the first 255 bytes of the name.
  bool of_job(const std::string& name) const;
};

/// Two copies of a memory, one after the other. What is equal in both was not written in between.
struct MemoryCopies {
  Bytes first, second;
};
/// kProtocol for memory that is shorter than its header or longer than `max_bytes`, or that changed its size. It is not
/// mapped, because its process could shrink it while the reader uses the mapping.
Result<MemoryCopies> copy_memory(const Fd& memory, size_t max_bytes);
/// Fills in all but `stopped`. Returns the scale for the ticks of the memory.
TickScale read_header(const ProcessMemoryHeader& header, ProcessState& state);

/// The object at `offset` of a copy. The caller has checked the offset.
template <class T>
const T& part(const Bytes& copy, size_t offset) {
  return *reinterpret_cast<const T*>(copy.data() + offset);
}

/// The memories with this name that the process has open. Empty if the kernel does not let this user read them.
std::vector<Fd> open_memories(pid_t pid, const char* name);
/// The processes of this user on this host that have such memory, sorted.
std::vector<pid_t> processes_with_memory(const char* name);
/// The PID of the process in its innermost PID namespace.
pid_t inner_pid(pid_t pid);
/// True if a signal or a debugger has stopped the process.
bool is_stopped(pid_t pid);

/// What the process noted in its memories with this name. Those that it inherited by a fork are left out, and those
/// that `read` refuses. T derives from ProcessState.
template <class T>
std::vector<T> read_memories(pid_t pid, const char* name, Result<T> (*read)(const Fd&)) {
  const pid_t owner = inner_pid(pid);
  std::vector<T> found;
  for (const Fd& memory : open_memories(pid, name)) {
    auto state = read(memory);
    if (!state || state->pid != owner) continue;
    state->stopped = is_stopped(pid);
    found.push_back(std::move(*state));
  }
  return found;
}

}  // namespace muster
