#include "nccl/communicator.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace muster::fake_nccl {
namespace {

constexpr size_t kWindow = 1 << 16;
constexpr size_t kHeader = 64;

}  // namespace

struct Communicator::Window {
  std::atomic<uint64_t> written, read;
  uint8_t data[kWindow];
};

Communicator::Communicator(std::string name, int ranks, int self)
    : size(ranks),
      rank(self),
      name_(std::move(name)),
      bytes_(kHeader + sizeof(Window) * static_cast<size_t>(ranks) * static_cast<size_t>(ranks)) {
  const int fd = shm_open(name_.c_str(), O_CREAT | O_RDWR, 0600);
  void* const mapped = fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes_)) == 0
                           ? mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
                           : MAP_FAILED;
  if (mapped == MAP_FAILED) {
    std::perror("fake NCCL: shared memory");
    std::abort();
  }
  close(fd);
  memory_ = static_cast<uint8_t*>(mapped);
}

Communicator::~Communicator() { munmap(memory_, bytes_); }

Communicator::Window& Communicator::window(int from, int to) const {
  return reinterpret_cast<Window*>(memory_ + kHeader)[from * size + to];
}

void Communicator::connect() {
  std::atomic<int>& arrived = reinterpret_cast<Header*>(memory_)->arrived;
  ++arrived;
  while (arrived < size && !aborted) std::this_thread::yield();
  shm_unlink(name_.c_str());
  error = 0;
}

bool Communicator::run(std::vector<Transfer>& transfers) {
  for (;;) {
    bool done = true, moved = false;
    for (size_t i = 0; i < transfers.size(); ++i) {
      Transfer& each = transfers[i];
      if (each.moved == each.bytes) continue;
      done = false;
      const bool first =
          std::none_of(transfers.begin(), transfers.begin() + static_cast<ptrdiff_t>(i), [&](auto& other) {
            return other.sends == each.sends && other.peer == each.peer && other.moved < other.bytes;
          });
      moved |= first && move(each);
    }
    if (done) return true;
    if (aborted) return false;
    if (!moved) std::this_thread::yield();
  }
}

bool Communicator::move(Transfer& transfer) const {
  Window& between = transfer.sends ? window(rank, transfer.peer) : window(transfer.peer, rank);
  const uint64_t written = between.written, read = between.read;
  const uint64_t offset = transfer.sends ? written % kWindow : read % kWindow;
  const uint64_t ready = transfer.sends ? kWindow - (written - read) : written - read;
  const size_t bytes = std::min<size_t>({transfer.bytes - transfer.moved, ready, kWindow - offset});
  if (bytes == 0) return false;
  if (transfer.sends) {
    std::memcpy(between.data + offset, transfer.data + transfer.moved, bytes);
    between.written = written + bytes;
  } else {
    std::memcpy(transfer.data + transfer.moved, between.data + offset, bytes);
    between.read = read + bytes;
  }
  transfer.moved += bytes;
  return true;
}

}  // namespace muster::fake_nccl
