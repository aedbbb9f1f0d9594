#include "store/store_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <vector>

#include "store/test_server.h"

namespace muster {

StoreProcess::StoreProcess(const Options& options) { start(options); }

void StoreProcess::start(const Options& options) {
  int input[2], output[2];
  ASSERT_EQ(pipe2(input, O_CLOEXEC), 0);
  ASSERT_EQ(pipe2(output, O_CLOEXEC), 0);
  input_.reset(input[1]);
  const Fd their_input(input[0]), ours(output[0]);
  Fd their_output(output[1]);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output[1], STDOUT_FILENO);
  std::string words[] = {MUSTER_STORE_SERVE,
                         "--alone",
                         to_string(test_secret()),
                         options.upstream,
                         std::to_string(std::chrono::ceil<std::chrono::milliseconds>(options.link_grace).count()),
                         options.session ? to_hex(*options.session) : ""};
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const int failed = posix_spawn(&pid_, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) pid_ = -1;
  ASSERT_EQ(failed, 0) << words[0];
  their_output.reset();  // closed here, so that the reads below end if the server dies
  std::string text;
  char bytes[256];
  for (ssize_t n = 0; text.find('\n') == std::string::npos && (n = read(ours.get(), bytes, sizeof bytes)) > 0;) {
    text.append(bytes, static_cast<size_t>(n));
  }
  const size_t space = text.find(' ');
  ASSERT_NE(space, std::string::npos) << "the server did not start: " << text;
  address_ = *Address::parse(text.substr(0, space));
  torch_ = *Address::parse(text.substr(space + 1, text.find('\n') - space - 1));
}

bool StoreProcess::runs() const {
  siginfo_t info{};
  return pid_ > 0 && waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
         info.si_pid == 0;
}

void StoreProcess::kill() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

void StoreProcess::stop() const {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGSTOP);
  siginfo_t info{};
  waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED | WEXITED | WNOWAIT);
}

void StoreProcess::resume() const {
  if (pid_ > 0) ::kill(pid_, SIGCONT);
}

size_t StoreProcess::descriptors() const {
  std::error_code error;
  const std::filesystem::directory_iterator all("/proc/" + std::to_string(pid_) + "/fd", error);
  return error ? 0 : static_cast<size_t>(std::distance(begin(all), end(all)));
}

size_t StoreProcess::bytes() const {
  size_t total = 0, resident = 0;
  std::ifstream("/proc/" + std::to_string(pid_) + "/statm") >> total >> resident;
  return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace muster
