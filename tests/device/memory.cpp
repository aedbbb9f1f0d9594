#include "device/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

namespace muster::device_double {
namespace {

constexpr std::size_t kBytes = std::size_t{4} << 30;  // of addresses; pages are taken when they are used
constexpr std::size_t kAlignment = 512;
constexpr int kPoison = 0xDD;

[[noreturn]] void fail(const char* why) {
  std::fprintf(stderr, "device double: %s\n", why);
  std::abort();
}

/// The same pages at two places: one without access, for programs, and one for kernels.
class Memory {
 public:
  Memory() {
    const int fd = memfd_create("device double", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, kBytes) != 0) fail("cannot make a memfd");
    device_ = map(fd, PROT_NONE);
    host_ = map(fd, PROT_READ | PROT_WRITE);
    close(fd);
    free_[0] = kBytes;
  }

  void* allocate(std::size_t bytes) {
    const std::size_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    const std::lock_guard lock(mutex_);
    for (auto block = free_.begin(); block != free_.end(); ++block) {
      const auto [offset, length] = *block;
      if (length < size) continue;
      free_.erase(block);
      if (length > size) free_[offset + size] = length - size;
      used_[offset] = size;
      return device_ + offset;
    }
    return nullptr;
  }

  void release(void* address) {
    const std::size_t offset = offset_of(address);
    const std::lock_guard lock(mutex_);
    const auto block = used_.find(offset);
    if (block == used_.end()) fail("release of an address that was not allocated");
    std::memset(host_ + offset, kPoison, block->second);
    const auto freed = free_.emplace(offset, block->second).first;
    used_.erase(block);
    if (const auto next = std::next(freed); next != free_.end() && freed->first + freed->second == next->first) {
      freed->second += next->second;
      free_.erase(next);
    }
    if (freed == free_.begin()) return;
    if (const auto before = std::prev(freed); before->first + before->second == freed->first) {
      before->second += freed->second;
      free_.erase(freed);
    }
  }

  std::size_t used_bytes() {
    const std::lock_guard lock(mutex_);
    std::size_t sum = 0;
    for (const auto& [offset, bytes] : used_) sum += bytes;
    return sum;
  }
  void* host_address(const void* address) const { return host_ + offset_of(address); }
  bool owns(const void* address) const { return address >= device_ && address < device_ + kBytes; }

 private:
  static char* map(int fd, int access) {
    void* const at = mmap(nullptr, kBytes, access, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (at == MAP_FAILED) fail("cannot map the memory");
    return static_cast<char*>(at);
  }

  std::size_t offset_of(const void* address) const {
    if (!owns(address)) fail("an address of the host where one of the device was expected");
    return static_cast<std::size_t>(static_cast<const char*>(address) - device_);
  }

  char* device_ = nullptr;
  char* host_ = nullptr;
  std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_;  ///< by offset: bytes
  std::map<std::size_t, std::size_t> used_;
};

Memory& memory() {
  static Memory& made = *new Memory;  // tensors may outlive static objects
  return made;
}

}  // namespace

void* allocate(std::size_t bytes) { return memory().allocate(bytes); }
void release(void* address) { memory().release(address); }
void* host_address(const void* address) { return memory().host_address(address); }
std::size_t used_bytes() { return memory().used_bytes(); }
bool owns(const void* address) { return memory().owns(address); }

}  // namespace muster::device_double
