#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace muster {

/// How a piece of a worker's output ends.
enum class LineEnd {
  kNewline,  ///< a whole line
  kRewrite,  ///< by '\r': the next piece replaces it (a progress bar)
  kNone,     ///< without a line end: the stream ended, or the line was too long
};

/// Splits a stream of arbitrary bytes into lines. "\r\n" ends a line like "\n".
class LineSplitter {
 public:
  static constexpr size_t kMaxLine = 64 << 10;  ///< longer lines are cut
  using Handler = std::function<void(std::string_view line, LineEnd end)>;

  explicit LineSplitter(Handler handler) : handler_(std::move(handler)) {}
  void feed(std::string_view bytes);
  /// Reports the rest. Call it when the stream has ended.
  void finish();
  /// The text since the last '\r', for progress bars that are drawn as "\rtext".
  std::string_view rewriting() const { return rewriting_ ? std::string_view(partial_) : std::string_view(); }

 private:
  void end(LineEnd how);

  Handler handler_;
  std::string partial_;
  bool pending_return_ = false;  // the last byte was a '\r'
  bool rewriting_ = false;
};

/// Writes lines and progress bars to a stream of the launcher.
class Terminal {
 public:
  using Write = std::function<void(std::string_view)>;
  /// `terminal`: draw progress bars in place below the lines.
  Terminal(bool terminal, Write write) : terminal_(terminal), write_(std::move(write)) {}

  /// Writes one line of `owner`, whose address is only compared.
  void line(const void* owner, std::string_view prefix, std::string_view text);
  /// Draws `owner`'s progress bar in place of its last one. Only one owner has the bottom line. The bars of other
  /// owners are not drawn during this time. If this is not a terminal, writes a line.
  void progress(const void* owner, std::string_view prefix, std::string_view text);
  bool terminal() const { return terminal_; }

 private:
  bool terminal_;
  Write write_;
  const void* bar_owner_ = nullptr;
  std::string bar_;
};

/// "[rank 3] ", with `color` in the color of this rank.
std::string rank_prefix(int rank, bool color);
/// Replaces ${role_name}, ${rank}, ${local_rank} and ${hostname} in torchrun's prefixes, also without the braces.
std::string expand_prefix(std::string_view pattern, std::string_view role, int rank, int local_rank);

/// Copies one stream of one worker to a Terminal.
class PrefixedStream {
 public:
  PrefixedStream(Terminal& terminal, std::string prefix);
  PrefixedStream(const PrefixedStream&) = delete;
  PrefixedStream& operator=(const PrefixedStream&) = delete;
  void feed(std::string_view bytes);
  void finish() { splitter_.finish(); }

 private:
  Terminal& terminal_;
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
