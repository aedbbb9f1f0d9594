#include "muster/launch/worker.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <system_error>

namespace muster {
namespace {

struct Pipe {
  Fd read, write;
};

Result<Pipe> make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return fail_errno(errno, "cannot make a pipe for a worker");
  return Pipe{Fd(ends[0]), Fd(ends[1])};
}

// What the child needs, made before the fork: between fork and exec only async-signal-safe calls are allowed.
struct Image {
  std::vector<std::string> entries;
  std::vector<char*> argv, envp;
};

void fill(Image& image, const WorkerSpec& spec) {
  for (const auto& [name, value] : spec.environment) image.entries.push_back(name + "=" + value);
  for (const auto& word : spec.command) image.argv.push_back(const_cast<char*>(word.c_str()));
  for (auto& entry : image.entries) image.envp.push_back(entry.data());
  image.argv.push_back(nullptr);
  image.envp.push_back(nullptr);
}

void restore_signals() {
  for (const int number : {SIGPIPE, SIGTTOU, SIGINT, SIGTERM, SIGCHLD}) ::signal(number, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

[[noreturn]] void become(const Image& image, pid_t agent, const std::array<int, 3>& stdio, int error_pipe) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != agent) ::_exit(128 + SIGKILL);  // it died before the line above took effect
  restore_signals();
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
  while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
  }
  const std::string reason = std::generic_category().message(error);
  if (error == ENOENT)  // the program was found before: it is the interpreter on its first line that is missing
    return fail(ErrorCode::kNotFound, "cannot start '" + program + "': " + reason + " (it, or its interpreter)");
  return fail(ErrorCode::kInvalidArgument, "cannot start '" + program + "': " + reason);
}

}  // namespace

Result<WorkerProcess> spawn(const WorkerSpec& spec) {
  MUSTER_ASSIGN(Pipe out, make_pipe());
  MUSTER_ASSIGN(Pipe err, make_pipe());
  MUSTER_ASSIGN(Pipe error, make_pipe());
  Fd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!null) return fail_errno(errno, "cannot open /dev/null");
  Image image;
  fill(image, spec);
  const pid_t agent = ::getpid();
  const std::array<int, 3> stdio = {spec.keeps_stdin ? 0 : null.get(), out.write.get(), err.write.get()};
  const pid_t pid = ::fork();
  if (pid < 0) return fail_errno(errno, "cannot fork a worker");
  if (pid == 0) become(image, agent, stdio, error.write.get());
  error.write.reset();
  MUSTER_TRY(await_exec(error.read.get(), pid, spec.command.front()));
  ::fcntl(out.read.get(), F_SETFL, O_NONBLOCK);
  ::fcntl(err.read.get(), F_SETFL, O_NONBLOCK);
  return WorkerProcess{pid, std::move(out.read), std::move(err.read)};
}

}  // namespace muster
