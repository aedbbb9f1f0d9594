#include "muster/launch/workers/worker.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <system_error>

#include "muster/launch/process_tree.h"

namespace muster {
namespace {

Result<> make_pipe(Fd& read, Fd& write) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return fail_errno(errno, "cannot create a pipe for a worker");
  read.reset(ends[0]);
  write.reset(ends[1]);
  return {};
}

// The child's data. It is allocated before the fork: between fork and exec only async-signal-safe calls are allowed.
struct Image {
  std::vector<std::string> entries;
  std::vector<char*> argv, envp;
  std::vector<cpu_set_t> cpus;
  bool has_terminal = true;
};

void fill(Image& image, const WorkerSpec& spec) {
  for (const auto& [name, value] : spec.environment) image.entries.push_back(name + "=" + value);
  for (const auto& word : spec.command) image.argv.push_back(const_cast<char*>(word.c_str()));
  for (auto& entry : image.entries) image.envp.push_back(entry.data());
  image.has_terminal = spec.has_terminal;
  for (const int cpu : spec.cpus) {
    image.cpus.resize(std::max(image.cpus.size(), static_cast<size_t>(cpu) / CPU_SETSIZE + 1));
    CPU_SET_S(static_cast<size_t>(cpu), image.cpus.size() * sizeof(cpu_set_t), image.cpus.data());
  }
  image.argv.push_back(nullptr);
  image.envp.push_back(nullptr);
}

[[noreturn]] void become(const Image& image, pid_t agent, const std::array<int, 3>& stdio, int error_pipe) {
  image.has_terminal ? ::setpgid(0, 0) : ::setsid();
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != agent) ::_exit(128 + SIGKILL);  // the agent died before the line above
  restore_signals({SIGPIPE, SIGTTOU, SIGINT, SIGTERM, SIGCHLD});
  if (!image.cpus.empty()) ::sched_setaffinity(0, image.cpus.size() * sizeof(cpu_set_t), image.cpus.data());
  bool ok = true;
  for (int fd = 0; fd < 3; ++fd) ok = ok && (stdio[fd] == fd || ::dup2(stdio[fd], fd) == fd);
  if (ok) ::execve(image.argv[0], image.argv.data(), image.envp.data());
  const int error = errno;
  [[maybe_unused]] const auto written = ::write(error_pipe, &error, sizeof(error));
  ::_exit(127);
}

Result<> await_exec(int error_pipe, pid_t pid, const std::string& program) {
  int error = 0;
  ssize_t got = 0;
  do got = ::read(error_pipe, &error, sizeof(error));
  while (got < 0 && errno == EINTR);
  if (got != sizeof(error)) return {};
  reap_child(pid);
  const std::string message = "cannot start '" + program + "': " + std::generic_category().message(error);
  if (error != ENOENT) return fail(ErrorCode::kInvalidArgument, message);
  // The program exists, so its interpreter is missing.
  return fail(ErrorCode::kNotFound, message + " (the program or its interpreter)");
}

}  // namespace

Result<WorkerPipes> WorkerPipes::open(bool keep_stdin) {
  WorkerPipes pipes;
  MUSTER_TRY(make_pipe(pipes.read_out, pipes.out));
  MUSTER_TRY(make_pipe(pipes.read_err, pipes.err));
  pipes.in.reset(keep_stdin ? ::fcntl(0, F_DUPFD_CLOEXEC, 3) : ::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!pipes.in) return fail_errno(errno, "cannot open a worker's standard input");
  ::fcntl(pipes.read_out.get(), F_SETFL, O_NONBLOCK);
  ::fcntl(pipes.read_err.get(), F_SETFL, O_NONBLOCK);
  return pipes;
}

Result<pid_t> spawn(const WorkerSpec& spec, const WorkerPipes& pipes) {
  Fd error_read, error_write;
  MUSTER_TRY(make_pipe(error_read, error_write));
  Image image;
  fill(image, spec);
  const pid_t agent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return fail_errno(errno, "cannot fork a worker");
  if (pid == 0) become(image, agent, {pipes.in.get(), pipes.out.get(), pipes.err.get()}, error_write.get());
  error_write.reset();
  MUSTER_TRY(await_exec(error_read.get(), pid, spec.command.front()));
  return pid;
}

}  // namespace muster
