#include "muster/launch/output/output_files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "muster/launch/private_directories.h"

namespace muster {
namespace {

namespace fs = std::filesystem;
constexpr std::string_view kNowhere = "/dev/null";  // torchrun's value for no files

bool wants_files(const RunOptions& options) {
  const auto any = [](const StreamChoice& c) { return c.all != kNoStream || !c.by_local_rank.empty(); };
  return any(options.redirects) || any(options.tee) || !options.stdout_filters.empty() ||
         !options.stderr_filters.empty();
}

// Without --log-dir the directory is directly in the temporary directory, because the owner of a directory in between
// could replace files.
fs::path run_directory_pattern(const RunOptions& options) {
  std::string name = options.run_id + "_XXXXXX";
  std::replace(name.begin(), name.end(), '/', '_');
  if (options.log_dir.empty()) return fs::path(temporary_directory()) / ("muster_" + name);
  std::error_code ignored;
  return fs::absolute(options.log_dir, ignored) / name;
}

Result<> make_directory(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (!error) return {};
  return fail(ErrorCode::kIo,
              fmt::format("cannot create the directory {} for the workers' output: {}", path, error.message()));
}

}  // namespace

Result<std::unique_ptr<OutputFiles>> OutputFiles::create(Loop& loop, Console& console, const RunOptions& options,
                                                         const Environment& environment, const std::string& scratch) {
  std::unique_ptr<OutputFiles> made(new OutputFiles(loop, console, options, environment));
  made->scratch_ = scratch;
  if (options.log_dir == kNowhere || (options.log_dir.empty() && !wants_files(options))) return made;
  std::string pattern = run_directory_pattern(options).string();
  const std::string base = fs::path(pattern).parent_path().string();
  MUSTER_TRY(make_directory(base));
  if (::mkdtemp(pattern.data()) == nullptr)
    return fail_errno(errno, fmt::format("cannot create a directory in {} for the workers' output", base));
  made->directory_ = pattern;
  if (options.log_dir.empty()) console.notice("the workers' output is kept in " + pattern);
  return made;
}

Result<> OutputFiles::begin_attempt(int number) {
  attempt_ = directory_.empty() ? "" : fmt::format("{}/attempt_{}", directory_, number);
  errors_ = directory_.empty() ? scratch_ : attempt_;
  for (int local = 0; local < options_.nproc; ++local) {
    MUSTER_TRY(make_directory(worker_directory(local)));
    ::unlink(error_file(local).c_str());
  }
  return {};
}

std::string OutputFiles::worker_directory(int local_rank) const { return fmt::format("{}/{}", errors_, local_rank); }

std::string OutputFiles::error_file(int local_rank) const { return worker_directory(local_rank) + "/error.json"; }

Fd OutputFiles::open_file(const std::string& path) {
  Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!file) console_.notice(fmt::format("cannot write {}: {}", path, std::generic_category().message(errno)));
  return file;
}

std::string OutputFiles::prefix(int rank, int local_rank) const {
  const auto variable = environment_.find("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE");
  const bool has_option = !options_.prefix_template.empty();
  if (!has_option && variable == environment_.end()) return rank_prefix(rank, console_.color());
  return expand_prefix(has_option ? options_.prefix_template : variable->second, options_.role, rank, local_rank);
}

std::unique_ptr<WorkerOutput> OutputFiles::open(int rank, int local_rank, Streams which, Fd pipe) {
  const bool out = which == kStdout;
  const std::string name = out ? "stdout.log" : "stderr.log";
  const bool redirected = options_.redirects.of(local_rank) & which, teed = options_.tee.of(local_rank) & which;
  const auto& show = options_.local_ranks_filter;
  WorkerOutput::Sinks sinks;
  sinks.prefix = prefix(rank, local_rank);
  sinks.filters = out ? options_.stdout_filters : options_.stderr_filters;
  if ((!redirected || teed) && (show.empty() || show.count(local_rank) != 0))
    sinks.terminal = out ? &console_.out() : &console_.err();
  if (!attempt_.empty() && (redirected || teed)) sinks.log = open_file(worker_directory(local_rank) + "/" + name);
  if (!attempt_.empty() && !sinks.filters.empty()) sinks.filtered = open_file(attempt_ + "/filtered_" + name);
  return std::make_unique<WorkerOutput>(loop_, console_, std::move(pipe), std::move(sinks));
}

}  // namespace muster
