#pragma once

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/io/fd.h"
#include "muster/io/loop.h"

namespace muster {

/// "SIGTERM", "SIGRTMIN+2"; "signal 99" for a number without a name.
std::string signal_name(int number);
/// The number of "SIGTERM", "TERM" or "term". None for other texts, and for real-time signals.
std::optional<int> signal_number(std::string_view name);

/// Workers get these signals as they are, because programs handle them, for example to write a checkpoint (Slurm's
/// --signal). Any other signal that ends the job becomes SIGTERM for the workers.
inline constexpr std::array kForwardedSignals = {SIGHUP, SIGUSR1, SIGUSR2};
constexpr bool is_forwarded(int number) {
  return std::ranges::find(kForwardedSignals, number) != kForwardedSignals.end();
}
/// All signals that `muster run` handles: `ending`, which end the job, and kForwardedSignals.
std::vector<int> handled_signals(std::vector<int> ending);

/// `muster run --hosts` forwards a signal as this byte, on the standard input of the launcher on the other host. The
/// lines of text before it have no such bytes.
constexpr uint8_t byte_of_signal(int number) { return static_cast<uint8_t>(0x80 | number); }
/// 0 if the byte is not that of a signal that is forwarded.
constexpr int signal_of_byte(uint8_t byte) { return byte >= 0x80 && is_forwarded(byte & 0x7f) ? byte & 0x7f : 0; }

/// Turns signals into callbacks on a loop. At most one object exists in a process at a time. A signal that is ignored
/// (nohup) stays ignored, except SIGCHLD: if it were ignored, no child could be reaped.
class SignalPipe {
 public:
  /// `signaled` is called for each of `signals`. `child_ended` is called once for any number of children that have
  /// ended.
  static Result<std::unique_ptr<SignalPipe>> open(Loop& loop, std::vector<int> signals,
                                                  std::function<void(int)> signaled, std::function<void()> child_ended);
  /// Restores the default effect of the signals.
  ~SignalPipe();
  SignalPipe(const SignalPipe&) = delete;
  SignalPipe& operator=(const SignalPipe&) = delete;

 private:
  SignalPipe(Loop& loop, Fd read, Fd write, std::vector<int> signals)
      : loop_(loop), read_(std::move(read)), write_(std::move(write)), signals_(std::move(signals)) {}
  void dispatch(const std::function<void(int)>& signaled, const std::function<void()>& child_ended) const;

  Loop& loop_;
  Fd read_, write_;
  std::vector<int> signals_;
};

}  // namespace muster
