#pragma once

#include <memory>
#include <string>

#include "muster/launch/options/options.h"
#include "muster/launch/output/console.h"
#include "muster/launch/output/worker_output.h"

namespace muster {

/// Copies the output of this node's workers to the console, to files, or to both. torchrun's layout of the files:
///
///   <log dir>/<run id>_<6 random letters>/attempt_<N>/<local rank>/stdout.log, stderr.log, error.json
///   <log dir>/<run id>_<6 random letters>/attempt_<N>/filtered_stdout.log, filtered_stderr.log
///   <TMPDIR>/muster_<run id>_<6 random letters>/... without --log-dir
///
/// Files are opened for appending, because one attempt may have several generations. A file that cannot be written is
/// reported once and closed. For the thread that drives the loop; borrows all its arguments.
class OutputFiles {
 public:
  /// Creates the run's directory in --log-dir. If options ask for files without --log-dir, it is in TMPDIR or /tmp.
  /// `scratch`: the directory of error.json if there is no run directory. kIo if a directory cannot be created; the
  /// message names it.
  static Result<std::unique_ptr<OutputFiles>> create(Loop& loop, Console& console, const RunOptions& options,
                                                     const Environment& environment, const std::string& scratch);

  /// Creates the directories of attempt N, the number of restarts. Call it before workers start.
  Result<> begin_attempt(int number);
  /// The absolute path for TORCHELASTIC_ERROR_FILE. begin_attempt() removes an older file.
  std::string error_file(int local_rank) const;
  /// Copies a worker's pipe as the options say. `which`: kStdout or kStderr.
  std::unique_ptr<WorkerOutput> open(int rank, int local_rank, Streams which, Fd pipe);

 private:
  OutputFiles(Loop& loop, Console& console, const RunOptions& options, const Environment& environment)
      : loop_(loop), console_(console), options_(options), environment_(environment) {}
  std::string worker_directory(int local_rank) const;
  std::string prefix(int rank, int local_rank) const;
  Fd open_file(const std::string& path);

  Loop& loop_;
  Console& console_;
  const RunOptions& options_;
  const Environment& environment_;
  std::string directory_;         // the run's directory; empty: no files
  std::string attempt_, errors_;  // the attempt's directory in directory_, and the directory of its error files
  std::string scratch_;
};

}  // namespace muster
