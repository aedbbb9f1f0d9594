#pragma once

#include <memory>

#include "muster/io/fd.h"
#include "muster/io/loop.h"
#include "muster/launch/console.h"
#include "muster/launch/output.h"

namespace muster {

/// Copies a worker's pipe to a screen, to a log file where there is one, and keeps its last bytes. For the thread that
/// drives the loop.
class WorkerOutput {
 public:
  /// `log`: none, or a file to append to.
  WorkerOutput(Loop& loop, Console& console, Screen& screen, Fd pipe, std::string prefix, Fd log);
  ~WorkerOutput();
  WorkerOutput(const WorkerOutput&) = delete;
  WorkerOutput& operator=(const WorkerOutput&) = delete;

  /// Reading stops by itself while the console is full: resume() when there is room again.
  void resume();
  /// Reads what is in the pipe now. True at its end: every process that had it open has closed it.
  bool drain();
  /// What is not a whole line yet is written too; nothing is read any more.
  void finish();
  const std::string& tail() const { return tail_.text(); }

 private:
  void pause();
  void on_readable();
  bool read_once();

  Loop& loop_;
  Console& console_;
  Fd pipe_, log_;
  PrefixedStream stream_;
  Tail tail_;
  bool watched_ = false;
};

}  // namespace muster
