#pragma once

#include <optional>
#include <string>
#include <vector>

#include "muster/io/fd.h"
#include "muster/io/loop.h"
#include "muster/launch/output/console.h"
#include "muster/launch/output/output.h"

namespace muster {

/// Copies the output that a worker writes to a pipe, and keeps its last bytes. For the thread that drives the loop.
class WorkerOutput {
 public:
  struct Sinks {
    Terminal* terminal = nullptr;  ///< null: the output is not shown
    std::string prefix;            ///< begins every line on the terminal and in `filtered`
    Fd log;                        ///< gets every byte; may be empty
    Fd filtered;                   ///< gets the lines that contain one of `filters`; opened for appending
    std::vector<std::string> filters;
  };

  WorkerOutput(Loop& loop, Console& console, Fd pipe, Sinks sinks);
  ~WorkerOutput();
  WorkerOutput(const WorkerOutput&) = delete;
  WorkerOutput& operator=(const WorkerOutput&) = delete;

  /// Reading stops while the console is full. Call this when there is room again.
  void resume();
  /// Reads all bytes that are in the pipe now.
  void drain();
  /// The same, and then stops reading and writes the last incomplete line.
  void finish();
  const std::string& tail() const { return tail_.text(); }

 private:
  void pause();
  void on_readable();
  bool read_once();
  void close();
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
