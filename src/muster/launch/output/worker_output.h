#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/io/fd.h"
#include "muster/io/loop.h"
#include "muster/launch/output/console.h"
#include "muster/launch/output/output.h"

namespace muster {

/// Copies a worker's pipe to wherever it is to go, and keeps its last bytes. For the thread that drives the loop.
class WorkerOutput {
 public:
  struct Sinks {
    Terminal* screen = nullptr;  ///< null: not shown
    std::string prefix;          ///< of every line on the screen and in `filtered`
    Fd log;                      ///< gets every byte; none: not kept
    Fd filtered;                 ///< gets the lines with one of the words in them; opened for appending
    std::vector<std::string> words;
  };

  WorkerOutput(Loop& loop, Console& console, Fd pipe, Sinks sinks);
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
  void write(Fd& file, std::string_view text);

  Loop& loop_;
  Console& console_;
  Fd pipe_;
  Sinks sinks_;
  std::optional<PrefixedStream> stream_;
  LineSplitter filter_;
  Tail tail_;
  bool watched_ = false;
};

}  // namespace muster
