#pragma once

#include <memory>
#include <string>

#include "muster/launch/options/options.h"
#include "muster/launch/output/console.h"
#include "muster/launch/output/worker_output.h"

namespace muster {

/// Where this node's workers write: to the console, to files, or to both. The files lie as torchrun lays them:
///
///   <log dir>/<run id>_<6 random letters>/attempt_<N>/<local rank>/stdout.log, stderr.log, error.json
///   <log dir>/<run id>_<6 random letters>/attempt_<N>/filtered_stdout.log, filtered_stderr.log
///   <TMPDIR>/muster_<run id>_<6 random letters>/... when no log dir is named
///
/// Files are appended to, so that generations of one attempt follow each other. What cannot be written is said once
/// and costs only that file. For the thread that drives the loop; borrows everything it is given.
class OutputFiles {
 public:
  /// Makes the run's folder: in --log-dir; or, when a file is asked for and no folder named, in TMPDIR or /tmp.
  /// `scratch`: holds error.json otherwise. kIo names the folder that cannot be made.
  static Result<std::unique_ptr<OutputFiles>> create(Loop& loop, Console& console, const RunOptions& options,
                                                     const Environment& environment, const std::string& scratch);

  /// Makes the folders of attempt N (the restarts so far); before workers are started.
  Result<> begin_attempt(int number);
  /// For TORCHELASTIC_ERROR_FILE, absolute; begin_attempt() has removed an older one.
  std::string error_file(int local_rank) const;
  /// Copies a worker's pipe where its options say. `which`: kStdout or kStderr.
  std::unique_ptr<WorkerOutput> open(int rank, int local_rank, Streams which, Fd pipe);

 private:
  OutputFiles(Loop& loop, Console& console, const RunOptions& options, const Environment& environment)
      : loop_(loop), console_(console), options_(options), environment_(environment) {}
  std::string worker_folder(int local_rank) const;
  std::string prefix(int rank, int local_rank) const;
  Fd open_file(const std::string& path);

  Loop& loop_;
  Console& console_;
  const RunOptions& options_;
  const Environment& environment_;
  std::string folder_;            // empty: kept nowhere
  std::string attempt_, errors_;  // the attempt's folder in folder_, and where its error files are
  std::string scratch_;
};

}  // namespace muster
