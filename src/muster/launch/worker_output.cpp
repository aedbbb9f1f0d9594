#include "muster/launch/worker_output.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <array>
#include <cerrno>

namespace muster {
namespace {

constexpr size_t kRead = 64 << 10;
constexpr int kMaxReads = 64;  // of drain(): a worker's child may write for ever

}  // namespace

WorkerOutput::WorkerOutput(Loop& loop, Console& console, Screen& screen, Fd pipe, std::string prefix, Fd log)
    : loop_(loop), console_(console), pipe_(std::move(pipe)), log_(std::move(log)), stream_(screen, std::move(prefix)) {
  resume();
}

WorkerOutput::~WorkerOutput() { pause(); }

void WorkerOutput::pause() {
  if (watched_) loop_.unwatch(pipe_.get());
  watched_ = false;
}

void WorkerOutput::resume() {
  if (watched_ || !pipe_) return;
  watched_ = loop_.watch(pipe_.get(), EPOLLIN, [this](uint32_t) { on_readable(); }).has_value();
}

void WorkerOutput::on_readable() {
  errno = 0;
  if (!read_once() && errno != EAGAIN && errno != EINTR) finish();
  if (console_.full()) pause();
}

bool WorkerOutput::read_once() {
  std::array<char, kRead> buffer;
  const ssize_t count = ::read(pipe_.get(), buffer.data(), buffer.size());
  if (count <= 0) return false;
  const std::string_view bytes(buffer.data(), static_cast<size_t>(count));
  tail_.feed(bytes);
  if (log_ && ::write(log_.get(), bytes.data(), bytes.size()) < 0) log_.reset();  // a full disk must not end the job
  stream_.feed(bytes);
  return true;
}

bool WorkerOutput::drain() {
  for (int i = 0; pipe_ && i < kMaxReads; ++i) {
    errno = 0;
    if (read_once()) continue;
    if (errno == EAGAIN) return false;
    finish();
  }
  return !pipe_;
}

void WorkerOutput::finish() {
  pause();
  pipe_.reset();
  stream_.finish();
}

}  // namespace muster
