#include "muster/flight/process_memory.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "muster/base/host_name.h"

namespace muster {
namespace {

int64_t wall_clock_offset() {
  timespec wall;
  clock_gettime(CLOCK_REALTIME, &wall);
  return wall.tv_sec * 1'000'000'000LL + wall.tv_nsec - steady_clock().now().ns;
}

template <class Visit>
void each_entry(const std::string& folder, Visit visit) {
  const std::unique_ptr<DIR, int (*)(DIR*)> open(opendir(folder.c_str()), closedir);
  if (!open) return;
  while (const dirent* entry = readdir(open.get())) visit(std::string(entry->d_name));
}

bool is_memory(const std::string& path, const char* name) {
  char target[64];
  const ssize_t size = readlink(path.c_str(), target, sizeof(target));
  return size > 0 &&
         std::string_view(target, static_cast<size_t>(size)).starts_with(std::string("/memfd:") + name + " ");
}

Result<Bytes> copy_once(const Fd& memory, size_t max_bytes) {
  struct stat info {};
  if (fstat(memory.get(), &info) != 0) return fail_errno(errno, "cannot look at a process's memory");
  const auto size = static_cast<size_t>(std::max<off_t>(info.st_size, 0));
  if (size < sizeof(ProcessMemoryHeader) || size > max_bytes) {
    return fail(ErrorCode::kProtocol, fmt::format("the memory of a process has an impossible size, {} bytes", size));
  }
  Bytes bytes(size);
  const ssize_t got = pread(memory.get(), bytes.data(), bytes.size(), 0);
  if (got != static_cast<ssize_t>(bytes.size())) return fail_errno(errno, "cannot read a process's memory");
  return bytes;
}

}  // namespace

// ---- the writer

std::optional<ProcessMemory> ProcessMemory::create(const char* name, size_t bytes) {
  Fd fd(memfd_create(name, MFD_CLOEXEC));
  if (!fd || ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return std::nullopt;
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) return std::nullopt;
  return ProcessMemory(std::move(fd), {static_cast<uint8_t*>(memory), Unmap{bytes}});
}

void ProcessMemory::Unmap::operator()(uint8_t* memory) const { munmap(memory, bytes); }

void ProcessMemory::publish(uint64_t magic) const {
  auto& header = *reinterpret_cast<ProcessMemoryHeader*>(data());
  header.tick_kind = best_ticks();
  header.pid = getpid();
  header.made = moment_now(header.tick_kind);
  header.wall_clock_offset = wall_clock_offset();
  put_text(header.host, host_name());
  const char* const run_id = std::getenv("MUSTER_RUN_ID");
  if (run_id != nullptr) put_text(header.run_id, run_id);
  std::atomic_thread_fence(std::memory_order_release);
  header.magic = magic;
}

// ---- readers

bool ProcessState::of_job(const std::string& name) const {
  return !name.empty() && run_id == name.substr(0, sizeof(ProcessMemoryHeader::run_id) - 1);
}

Result<MemoryCopies> copy_memory(const Fd& memory, size_t max_bytes) {
  MUSTER_ASSIGN(Bytes first, copy_once(memory, max_bytes));
  MUSTER_ASSIGN(Bytes second, copy_once(memory, max_bytes));
  if (first.size() == second.size()) return MemoryCopies{std::move(first), std::move(second)};
  return fail(ErrorCode::kProtocol, "the memory of a process changed its size");
}

TickScale read_header(const ProcessMemoryHeader& header, ProcessState& state) {
  const TickKind kind = header.tick_kind == TickKind::kCounter ? TickKind::kCounter : TickKind::kNanoseconds;
  const Moment now = moment_now(kind);
  state.pid = header.pid;
  state.host = text_of(header.host);
  state.run_id = exact_text(header.run_id);
  state.taken = TimePoint{now.ns};
  constexpr int64_t kMost = 4'000'000'000'000'000'000;  // so that its sum with a time does not overflow
  state.wall_clock_offset = std::clamp(header.wall_clock_offset, -kMost, kMost);
  return {kind, header.made, now};
}

std::vector<Fd> open_memories(pid_t pid, const char* name) {
  const std::string folder = fmt::format("/proc/{}/fd/", pid);
  std::vector<Fd> found;
  each_entry(folder, [&](const std::string& entry) {
    if (!is_memory(folder + entry, name)) return;
    Fd memory(open((folder + entry).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (memory) found.push_back(std::move(memory));
  });
  return found;
}

std::vector<pid_t> processes_with_memory(const char* name) {
  std::vector<pid_t> found;
  each_entry("/proc", [&](const std::string& entry) {
    pid_t pid = 0;
    const auto read = std::from_chars(entry.data(), entry.data() + entry.size(), pid);
    if (read.ec != std::errc() || read.ptr != entry.data() + entry.size()) return;
    const std::string folder = "/proc/" + entry + "/fd/";
    bool has = false;
    each_entry(folder, [&](const std::string& fd) { has = has || is_memory(folder + fd, name); });
    if (has) found.push_back(pid);
  });
  std::sort(found.begin(), found.end());
  return found;
}

/// The kernel lists the innermost PID last.
pid_t inner_pid(pid_t pid) {
  std::ifstream status(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with("NSpid:")) continue;
    std::istringstream numbers(line.substr(6));
    pid_t inner = pid;
    while (numbers >> inner) {
    }
    return inner;
  }
  return pid;
}

bool is_stopped(pid_t pid) {
  std::ifstream stat(fmt::format("/proc/{}/stat", pid));
  std::string line;
  std::getline(stat, line);
  const size_t name_end = line.rfind(')');  // a program's name may contain any character
  return name_end != std::string::npos && name_end + 2 < line.size() &&
         (line[name_end + 2] == 'T' || line[name_end + 2] == 't');
}

}  // namespace muster
