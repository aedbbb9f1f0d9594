#pragma once

#include <signal.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "muster/io/fd.h"
#include "muster/store/store.h"

namespace muster {

/// A server of another project. A test starts it in a directory of its own. It ends with the test.
class ServerProcess {
 public:
  /// `words` are the program and its arguments. "{folder}" stands for the directory. Returns null if the program is not
  /// installed. The test must then be skipped. It fails if MUSTER_REQUIRE_STORES is set.
  static std::unique_ptr<ServerProcess> start(std::vector<std::string> words);
  ~ServerProcess();
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  /// kill() ends the server with SIGKILL. restart() starts it again with the data in its directory.
  void kill();
  void restart();
  /// Stops all threads of the server with SIGSTOP. kill() still ends it.
  void stop();
  const std::string& folder() const { return folder_; }

 private:
  ServerProcess() = default;
  std::string folder_;
  std::vector<std::string> words_;
  pid_t pid_ = -1;
};

/// A server that a test plays itself, in a thread that takes no signals. It serves one client.
class FakeServer {
 public:
  /// Calls `serve` with the connection, whose calls wait. It must return when the client closes the connection.
  explicit FakeServer(std::function<void(int client)> serve);
  ~FakeServer();
  FakeServer(const FakeServer&) = delete;
  FakeServer& operator=(const FakeServer&) = delete;
  uint16_t port() const { return port_; }

 private:
  Fd listener_;
  uint16_t port_;
  std::thread thread_;
};

/// A port that was free a moment ago, for servers that do not accept port 0.
uint16_t free_port();
/// Opens the store as soon as its server is up. Returns null after a minute.
std::unique_ptr<Store> open_when_up(const std::string& url);

}  // namespace muster
