#include "muster/launch/output/worker_output.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>

namespace muster {
namespace {

constexpr size_t kRead = 64 << 10;
constexpr int kMaxReads = 64;  // per drain(), because a child of a worker may write without end

}  // namespace

WorkerOutput::WorkerOutput(Loop& loop, Console& console, Fd pipe, Sinks sinks)
    : loop_(loop),
      console_(console),
      pipe_(std::move(pipe)),
      sinks_(std::move(sinks)),
      filter_([this](auto line, LineEnd) {
        const auto in_line = [&](const std::string& word) { return line.find(word) != std::string_view::npos; };
        if (std::any_of(sinks_.filters.begin(), sinks_.filters.end(), in_line))
          write(sinks_.filtered, sinks_.prefix + std::string(line) + "\n");
      }) {
  if (sinks_.terminal != nullptr) stream_.emplace(*sinks_.terminal, sinks_.prefix);
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
  if (!read_once() && errno != EAGAIN && errno != EINTR) close();
  if (console_.full()) pause();
}

bool WorkerOutput::read_once() {
  std::array<char, kRead> buffer;
  const ssize_t count = ::read(pipe_.get(), buffer.data(), buffer.size());
  if (count <= 0) return false;
  const std::string_view bytes(buffer.data(), static_cast<size_t>(count));
  tail_.feed(bytes);
  write(sinks_.log, bytes);
  if (sinks_.filtered) filter_.feed(bytes);
  if (stream_) stream_->feed(bytes);
  return true;
}

// If the disk is full, the file is closed and the job continues.
void WorkerOutput::write(Fd& file, std::string_view text) {
  if (!file || ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size())) return;
  console_.notice("a file of " + sinks_.prefix +
                  "cannot be written any more: " + std::generic_category().message(errno));
  file.reset();
}

void WorkerOutput::drain() {
  for (int i = 0; pipe_ && i < kMaxReads; ++i) {
    errno = 0;
    if (read_once()) continue;
    if (errno == EAGAIN) return;
    close();
  }
}

void WorkerOutput::finish() {
  drain();
  if (pipe_) close();
}

void WorkerOutput::close() {
  pause();
  pipe_.reset();
  if (sinks_.filtered) filter_.finish();
  if (stream_) stream_->finish();
}

}  // namespace muster
