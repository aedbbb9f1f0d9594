#include "store/external_server.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "muster/base/random.h"
#include "muster/io/socket.h"

namespace muster {
namespace {

bool on_path(const std::string& program) {
  std::string path = std::getenv("PATH") == nullptr ? "" : std::getenv("PATH");
  path += ":/usr/sbin:";
  for (size_t begin = 0, end; (end = path.find(':', begin)) != std::string::npos; begin = end + 1) {
    if (::access((path.substr(begin, end - begin) + "/" + program).c_str(), X_OK) == 0) return true;
  }
  return false;
}

/// In memory if there is room: etcd fails requests when a busy disk takes seconds to write its log.
std::string parent_folder() {
  std::error_code error;
  const auto space = std::filesystem::space("/dev/shm", error);
  return !error && space.available > (size_t{1} << 30) ? "/dev/shm" : testing::TempDir();
}

pid_t spawn(const std::vector<std::string>& words, const std::string& folder) {
  const std::string log = folder + "/log";
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  const pid_t parent = ::getpid(), pid = ::fork();
  if (pid != 0) return pid;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(126);
  const int out = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  ::dup2(out, STDOUT_FILENO);
  ::dup2(out, STDERR_FILENO);
  ::execvp(argv[0], argv.data());
  ::_exit(127);
}

}  // namespace

std::unique_ptr<ServerProcess> ServerProcess::start(std::vector<std::string> words) {
  if (!on_path(words[0])) {
    if (std::getenv("MUSTER_REQUIRE_STORES") != nullptr) ADD_FAILURE() << words[0] << " is not installed";
    return nullptr;
  }
  std::unique_ptr<ServerProcess> server(new ServerProcess);
  std::string pattern = parent_folder() + "/test-server-XXXXXX";
  server->folder_ = ::mkdtemp(pattern.data());
  for (std::string& word : words) {
    if (const size_t at = word.find("{folder}"); at != std::string::npos) word.replace(at, 8, server->folder_);
  }
  server->words_ = std::move(words);
  server->restart();
  return server;
}

ServerProcess::~ServerProcess() {
  kill();
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

void ServerProcess::kill() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

void ServerProcess::stop() {
  ::kill(pid_, SIGSTOP);
  ::waitpid(pid_, nullptr, WUNTRACED);
}

void ServerProcess::restart() {
  kill();
  pid_ = spawn(words_, folder_);
}

FakeServer::FakeServer(std::function<void(int client)> serve)
    : listener_(std::move(*listen_on(*Address::parse("127.0.0.1:0")))), port_(local_address(listener_.get())->port()) {
  ::fcntl(listener_.get(), F_SETFL, 0);  // so that accept() waits
  thread_ = std::thread([this, serve = std::move(serve)] {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
    const Fd client(::accept(listener_.get(), nullptr, nullptr));
    if (client) serve(client.get());
  });
}

FakeServer::~FakeServer() {
  ::shutdown(listener_.get(), SHUT_RDWR);  // ends accept() if no client has come
  thread_.join();
}

uint16_t free_port() {
  // Below those that the kernel gives to clients (from 32768): other tests connect at the same time.
  static Random random(static_cast<uint64_t>(::getpid()));
  while (true) {
    const uint64_t port = random.between(12000, 32000);
    if (listen_on(*Address::parse("127.0.0.1:" + std::to_string(port)))) return static_cast<uint16_t>(port);
  }
}

std::unique_ptr<Store> open_when_up(const std::string& url) {
  const Deadline deadline = Deadline::after(60s);
  while (true) {
    auto store = open_store(url, {}, deadline);
    if (store) return std::move(*store);
    if (deadline.passed()) {
      ADD_FAILURE() << store.error().to_string();
      return nullptr;
    }
    // tidy: allow(sleep) another program starts and does not report when it is ready
    std::this_thread::sleep_for(10ms);
  }
}

}  // namespace muster
