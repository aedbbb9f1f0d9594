#include "muster/launch/output/output.h"

#include <fmt/format.h>

#include <iterator>

#include "muster/base/host_name.h"

namespace muster {
namespace {

constexpr std::string_view kClearLine = "\r\x1b[K";

}  // namespace

void LineSplitter::feed(std::string_view bytes) {
  while (!bytes.empty()) {
    if (pending_return_) {
      pending_return_ = false;
      if (bytes.front() == '\n') {
        bytes.remove_prefix(1);
        end(LineEnd::kNewline);
        continue;
      }
      end(LineEnd::kRewrite);
    }
    const size_t room = kMaxLine - partial_.size();
    const size_t stop = bytes.find_first_of("\r\n");
    const size_t take = std::min({stop, bytes.size(), room});
    partial_.append(bytes.substr(0, take));
    bytes.remove_prefix(take);
    if (take == stop) {
      pending_return_ = bytes.front() == '\r';
      if (!pending_return_) end(LineEnd::kNewline);
      bytes.remove_prefix(1);
    } else if (partial_.size() == kMaxLine) {
      end(LineEnd::kNone);
    }
  }
}

void LineSplitter::finish() {
  if (pending_return_ || !partial_.empty()) end(pending_return_ ? LineEnd::kNewline : LineEnd::kNone);
  pending_return_ = false;
}

void LineSplitter::end(LineEnd how) {
  const bool redraws_nothing = how == LineEnd::kRewrite && partial_.empty();
  if (!redraws_nothing) handler_(partial_, how);
  partial_.clear();
  rewriting_ = how == LineEnd::kRewrite;
}

void Terminal::line(const void* owner, std::string_view prefix, std::string_view text) {
  if (bar_owner_ == owner) bar_owner_ = nullptr, bar_.clear();
  std::string out;
  if (terminal_) out += kClearLine;
  fmt::format_to(std::back_inserter(out), "{}{}\n{}", prefix, text, bar_);
  write_(out);
}

void Terminal::progress(const void* owner, std::string_view prefix, std::string_view text) {
  if (!terminal_) return line(owner, prefix, text);
  if (bar_owner_ != nullptr && bar_owner_ != owner) return;
  std::string bar = fmt::format("{}{}", prefix, text);
  if (bar_owner_ == owner && bar == bar_) return;  // the end of the line repeats the drawn text
  bar_owner_ = owner;
  bar_ = std::move(bar);
  write_(fmt::format("{}{}", kClearLine, bar_));
}

std::string rank_prefix(int rank, bool color) {
  if (!color) return fmt::format("[rank {}] ", rank);
  constexpr int kColors[] = {36, 33, 32, 35, 34, 96, 93, 92, 95, 94};
  return fmt::format("\x1b[{}m[rank {}]\x1b[0m ", kColors[static_cast<size_t>(rank) % std::size(kColors)], rank);
}

std::string expand_prefix(std::string_view pattern, std::string_view role, int rank, int local_rank) {
  std::string out(pattern);
  const std::pair<std::string, std::string> values[] = {{"local_rank", std::to_string(local_rank)},
                                                        {"role_name", std::string(role)},
                                                        {"rank", std::to_string(rank)},
                                                        {"hostname", host_name()}};
  for (const auto& [name, value] : values) {
    for (const auto& written : {"${" + name + "}", "$" + name}) {
      for (size_t at = 0; (at = out.find(written, at)) != std::string::npos; at += value.size())
        out.replace(at, written.size(), value);
    }
  }
  return out;
}

PrefixedStream::PrefixedStream(Terminal& terminal, std::string prefix)
    : terminal_(terminal), prefix_(std::move(prefix)), splitter_([this](std::string_view text, LineEnd end) {
        if (end == LineEnd::kRewrite) return terminal_.progress(this, prefix_, text);
        terminal_.line(this, prefix_, text);
      }) {}

void PrefixedStream::feed(std::string_view bytes) {
  splitter_.feed(bytes);
  const auto bar = splitter_.rewriting();
  if (!bar.empty() && terminal_.terminal()) terminal_.progress(this, prefix_, bar);
}

void Tail::feed(std::string_view bytes) {
  if (bytes.size() >= kMax) bytes = bytes.substr(bytes.size() - kMax), text_.clear();
  text_.append(bytes);
  // Cuts rarely, because each cut moves the whole tail.
  if (text_.size() > 2 * kMax) text_.erase(0, text_.size() - kMax);
}

}  // namespace muster
