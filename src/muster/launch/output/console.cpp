#include "muster/launch/output/console.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>

namespace muster {
namespace {

// A pipe that poll() reports as writable accepts this much without blocking (PIPE_BUF, a page).
constexpr size_t kPiece = 4096;

bool writable(int fd, int timeout_ms) {
  pollfd entry{fd, POLLOUT, 0};
  return ::poll(&entry, 1, timeout_ms) > 0;
}

// Opens a terminal again in non-blocking mode, because a terminal that poll() reports as writable may accept only one
// byte.
Fd open_terminal(int fd) {
  if (::isatty(fd) != 1) return {};
  return Fd(::open(fmt::format("/proc/self/fd/{}", fd).c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
}

}  // namespace

AsyncWriter::AsyncWriter(Loop& loop, int fd)
    : loop_(loop), terminal_(open_terminal(fd)), fd_(terminal_ ? terminal_.get() : fd) {}

AsyncWriter::~AsyncWriter() {
  if (watched_) loop_.unwatch(fd_);
}

void AsyncWriter::write(std::string_view text) {
  if (broken_) return;
  waiting_.append(text);
  if (!watched_) write_some();
  update_watch();
}

void AsyncWriter::write_some() {
  while (!broken_ && written_ < waiting_.size() && writable(fd_, 0)) {
    const size_t piece = std::min(kPiece, waiting_.size() - written_);
    const ssize_t count = ::write(fd_, waiting_.data() + written_, piece);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) break;
    broken_ = count < 0;
    if (count > 0) written_ += static_cast<size_t>(count);
  }
  if (broken_) written_ = waiting_.size();
  if (written_ == waiting_.size() || written_ > kFull) waiting_.erase(0, std::exchange(written_, 0));
}

void AsyncWriter::update_watch() {
  const bool wanted = !waiting_.empty() && watchable_;
  if (wanted && !watched_) {
    const auto watching = loop_.watch(fd_, EPOLLOUT, [this](uint32_t) {
      write_some();
      update_watch();
      if (!full() && on_room_) on_room_();
    });
    watched_ = watching.has_value();
    watchable_ = watched_;  // epoll refuses regular files, which are always writable
  } else if (!wanted && watched_) {
    loop_.unwatch(fd_);
    watched_ = false;
  }
}

void AsyncWriter::flush(Duration patience) {
  Deadline deadline = Deadline::after(patience);
  while (!waiting_.empty() && writable(fd_, deadline.poll_timeout_ms())) {
    const size_t before = waiting_.size() - written_;
    write_some();
    if (waiting_.size() - written_ < before) {
      deadline = Deadline::after(patience);
    } else if (deadline.passed()) {
      break;  // a terminal may have less room than one character needs
    }
  }
  waiting_.clear();
  written_ = 0;
  update_watch();
}

Console::Console(Loop& loop)
    : out_(loop, STDOUT_FILENO),
      err_(loop, STDERR_FILENO),
      shared_(::isatty(STDOUT_FILENO) == 1 && ::isatty(STDERR_FILENO) == 1),
      color_(shared_ && std::getenv("NO_COLOR") == nullptr),
      out_terminal_(::isatty(STDOUT_FILENO) == 1, [this](std::string_view text) { out_.write(text); }),
      err_terminal_(::isatty(STDERR_FILENO) == 1, [this](std::string_view text) { err_.write(text); }) {}

void Console::notice(std::string_view text) { err().line(this, "muster: ", text); }

void Console::on_room(const std::function<void()>& callback) {
  out_.on_room(callback);
  err_.on_room(callback);
}

void Console::flush(Duration patience) {
  out_.flush(patience);
  err_.flush(patience);
}

}  // namespace muster
