#include "muster/launch/workers/zygote_program.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "muster/launch/process_tree.h"

namespace muster {
namespace {

constexpr size_t kMaxMessage = 64 << 10;
constexpr size_t kMaxFds = 8;
constexpr size_t kTitleRoom = 4096;  // space for the command lines that workers show
constexpr const char* kLoad =
    "import sys;text=open(3,encoding='utf-8',closefd=False).read();"
    "exec(compile(text.split('\\0',1)[0],'<muster zygote>','exec'))";

[[noreturn]] void become(const ZygoteStart& start, int text, std::vector<char*>& argv, std::vector<char*>& envp) {
  start.detached ? ::setsid() : ::setpgid(0, 0);
  if (!start.detached) ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  restore_signals({SIGPIPE, SIGTTOU, SIGINT, SIGTERM, SIGCHLD, SIGHUP});
  // Duplicates to high numbers first, so that no dup2() overwrites a descriptor that is still needed.
  const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  const std::array<int, 5> from = {null, start.output, start.output, text, start.socket};
  std::array<int, 5> high{};
  for (size_t fd = 0; fd < from.size(); ++fd) high[fd] = ::fcntl(from[fd], F_DUPFD_CLOEXEC, 10);
  bool ok = true;
  for (size_t fd = 0; fd < from.size(); ++fd) ok = ok && ::dup2(high[fd], static_cast<int>(fd)) >= 0;
  if (ok) ::execve(argv[0], argv.data(), envp.data());
  ::_exit(127);
}

}  // namespace

Result<Fd> memory_file(const std::string& bytes) {
  Fd file(::memfd_create("muster-zygote", MFD_CLOEXEC));
  if (!file) return fail_errno(errno, "cannot create a file in memory for the zygote");
  for (size_t written = 0; written < bytes.size();) {
    const auto count =
        ::pwrite(file.get(), bytes.data() + written, bytes.size() - written, static_cast<off_t>(written));
    if (count < 0 && errno != EINTR) return fail_errno(errno, "cannot fill a file in memory for the zygote");
    if (count > 0) written += static_cast<size_t>(count);
  }
  return file;
}

Result<pid_t> start_zygote(const ZygoteStart& start) {
  MUSTER_ASSIGN(const Fd text, memory_file(zygote_text()));
  std::vector<std::string> words = {start.python, "-u", "-c", kLoad};
  words.insert(words.end(), start.args.begin(), start.args.end());
  words.emplace_back(kTitleRoom, ' ');
  std::vector<std::string> entries;
  for (const auto& [name, value] : start.environment) entries.push_back(name + "=" + value);
  std::vector<char*> argv, envp;
  for (auto& word : words) argv.push_back(word.data());
  for (auto& entry : entries) envp.push_back(entry.data());
  argv.push_back(nullptr);
  envp.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) become(start, text.get(), argv, envp);
  if (pid < 0) return fail_errno(errno, "cannot fork the zygote");
  return pid;
}

Result<> send_message(int socket, const std::string& text, const std::vector<int>& fds) {
  iovec data{const_cast<char*>(text.data()), text.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxFds * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  }
  ssize_t sent = 0;
  do sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  while (sent < 0 && errno == EINTR);
  if (sent >= 0) return {};
  if (errno == EAGAIN) return fail(ErrorCode::kUnavailable, "the zygote takes no more messages now");
  return fail_errno(errno, "cannot write to the zygote");
}

Result<std::string> receive_message(int socket) {
  std::string text(kMaxMessage, '\0');
  ssize_t count = 0;
  do count = ::recv(socket, text.data(), text.size(), MSG_DONTWAIT);
  while (count < 0 && errno == EINTR);
  if (count < 0 && errno == EAGAIN) return fail(ErrorCode::kUnavailable, "no message");
  if (count <= 0) return fail(ErrorCode::kPeerLost, "the zygote has closed its socket");
  text.resize(static_cast<size_t>(count));
  return text;
}

}  // namespace muster
