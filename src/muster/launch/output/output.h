#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace muster {

/// How a piece of a worker's output ended.
enum class LineEnd {
  kNewline,  ///< a whole line
  kRewrite,  ///< by '\r': the next piece takes its place (a progress bar)
  kNone,     ///< not ended: the stream did, or the line was cut because it is too long
};

/// Cuts one stream of output into lines, whatever bytes are in them. "\r\n" ends a line as "\n" does.
class LineSplitter {
 public:
  static constexpr size_t kMaxLine = 64 << 10;  ///< longer lines are cut
  using Handler = std::function<void(std::string_view line, LineEnd end)>;

  explicit LineSplitter(Handler handler) : handler_(std::move(handler)) {}
  void feed(std::string_view bytes);
  /// The stream has ended: hands out what is left.
  void finish();
  /// What has come since the last end, if that was a '\r': the state of a progress bar that is drawn "\rtext".
  std::string_view rewriting() const { return rewriting_ ? std::string_view(partial_) : std::string_view(); }

 private:
  void end(LineEnd how);

  Handler handler_;
  std::string partial_;
  bool pending_return_ = false;  // a '\r' was seen, and not yet what follows it
  bool rewriting_ = false;
};

/// Where finished text goes: stdout and stderr of the launcher, or one screen that is both.
class Terminal {
 public:
  using Write = std::function<void(std::string_view)>;
  /// `terminal`: progress bars are drawn in place, at the bottom, below the lines.
  Terminal(bool terminal, Write write) : terminal_(terminal), write_(std::move(write)) {}

  /// One line of `owner` (who is only compared).
  void line(const void* owner, std::string_view prefix, std::string_view text);
  /// Draws `owner`'s progress bar in place of its last one. While one owner has the bottom line the others' bars wait
  /// for it. Not a terminal: written as a line.
  void progress(const void* owner, std::string_view prefix, std::string_view text);
  bool terminal() const { return terminal_; }

 private:
  bool terminal_;
  Write write_;
  const void* bar_owner_ = nullptr;
  std::string bar_;
};

/// "[rank 3] ", in a colour of that rank's own where asked.
std::string rank_prefix(int rank, bool colour);
/// torchrun's prefixes: ${role_name}, ${rank} and ${local_rank} are replaced, also without the braces; the rest stays.
std::string expand_prefix(std::string_view pattern, std::string_view role, int rank, int local_rank);

/// One stream of one worker on its way to a screen.
class PrefixedStream {
 public:
  PrefixedStream(Terminal& screen, std::string prefix);
  PrefixedStream(const PrefixedStream&) = delete;
  PrefixedStream& operator=(const PrefixedStream&) = delete;
  void feed(std::string_view bytes);
  void finish() { splitter_.finish(); }

 private:
  Terminal& screen_;
  std::string prefix_;
  LineSplitter splitter_;
};

/// The last bytes of a stream.
class Tail {
 public:
  static constexpr size_t kMax = 64 << 10;
  void feed(std::string_view bytes);
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace muster
