#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "muster/io/fd.h"
#include "muster/io/loop.h"
#include "muster/launch/output/output.h"

namespace muster {

/// How long a console that ends may take for what is left to write.
inline constexpr Duration kFlushTime = std::chrono::seconds(5);

/// Writes to a descriptor that it borrows and leaves blocking (the flag is shared with whoever else has it open; of a
/// terminal it opens one of its own) without being held up by a reader that is slow: what cannot be written now waits.
/// A reader that is gone loses the output, not the job. For the thread that drives the loop.
class AsyncWriter {
 public:
  static constexpr size_t kFull = 1 << 20;

  AsyncWriter(Loop& loop, int fd);
  ~AsyncWriter();
  AsyncWriter(const AsyncWriter&) = delete;
  AsyncWriter& operator=(const AsyncWriter&) = delete;

  void write(std::string_view text);
  /// More than kFull bytes wait: time to stop reading what is copied here.
  bool full() const { return waiting_.size() - written_ > kFull; }
  void on_room(std::function<void()> callback) { on_room_ = std::move(callback); }
  /// Writes what waits, until the reader has taken nothing for `patience`; the rest is lost.
  void flush(Duration patience);

 private:
  void write_some();
  void update_watch();

  Loop& loop_;
  Fd terminal_;
  int fd_;
  std::string waiting_;
  size_t written_ = 0;  // of waiting_
  bool watched_ = false, watchable_ = true, broken_ = false;
  std::function<void()> on_room_;
};

/// The launcher's stdout and stderr, one screen where both are the same terminal.
class Console {
 public:
  explicit Console(Loop& loop);

  Terminal& out() { return out_screen_; }
  Terminal& err() { return shared_ ? out_screen_ : err_screen_; }
  bool colour() const { return colour_; }
  /// A message of the launcher's own, on stderr: "muster: ...".
  void notice(std::string_view text);
  bool full() const { return out_.full() || err_.full(); }
  void on_room(const std::function<void()>& callback);
  void flush(Duration patience);

 private:
  AsyncWriter out_, err_;
  bool shared_, colour_;
  Terminal out_screen_, err_screen_;
};

}  // namespace muster
