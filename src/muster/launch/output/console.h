#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "muster/io/fd.h"
#include "muster/io/loop.h"
#include "muster/launch/output/output.h"

namespace muster {

/// How long a console may take at its end to write its buffer.
inline constexpr Duration kFlushTime = std::chrono::seconds(5);

/// Writes to a borrowed descriptor without waiting for a slow reader: it buffers the output that cannot be written yet.
/// The descriptor stays in blocking mode, because other processes share this flag. A terminal is opened again instead.
/// If the reader is gone, the output is lost and the job continues. For the thread that drives the loop.
class AsyncWriter {
 public:
  static constexpr size_t kFull = 1 << 20;

  AsyncWriter(Loop& loop, int fd);
  ~AsyncWriter();
  AsyncWriter(const AsyncWriter&) = delete;
  AsyncWriter& operator=(const AsyncWriter&) = delete;

  void write(std::string_view text);
  /// True if more than kFull bytes are buffered. The caller should then stop reading its input.
  bool full() const { return waiting_.size() - written_ > kFull; }
  void on_room(std::function<void()> callback) { on_room_ = std::move(callback); }
  /// Writes the buffer until the reader has taken nothing for `patience`. The rest is lost.
  void flush(Duration patience);

 private:
  void write_some();
  void update_watch();

  Loop& loop_;
  Fd terminal_;
  int fd_;
  std::string waiting_;
  size_t written_ = 0;  // bytes of waiting_ that were written
  bool watched_ = false, watchable_ = true, broken_ = false;
  std::function<void()> on_room_;
};

/// The launcher's stdout and stderr: one Terminal if both are terminals.
class Console {
 public:
  explicit Console(Loop& loop);

  Terminal& out() { return out_terminal_; }
  Terminal& err() { return shared_ ? out_terminal_ : err_terminal_; }
  bool color() const { return color_; }
  /// Prints a message of the launcher to stderr: "muster: ...".
  void notice(std::string_view text);
  bool full() const { return out_.full() || err_.full(); }
  void on_room(const std::function<void()>& callback);
  void flush(Duration patience);

 private:
  AsyncWriter out_, err_;
  bool shared_, color_;
  Terminal out_terminal_, err_terminal_;
};

}  // namespace muster
