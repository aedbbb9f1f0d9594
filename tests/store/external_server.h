#pragma once

#include <signal.h>

#include <memory>
#include <string>
#include <vector>

#include "muster/store/store.h"

namespace muster {

/// A server that is not muster's, started by a test in a directory of its own. It ends with the test.
class ServerProcess {
 public:
  /// `words`: program and arguments; "{folder}" stands for the directory. Null if the program is not installed: then
  /// the test is skipped, or fails if MUSTER_REQUIRE_STORES is set.
  static std::unique_ptr<ServerProcess> start(std::vector<std::string> words);
  ~ServerProcess();
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  /// Ends it with SIGKILL. And starts it again with the data of its directory.
  void kill();
  void restart();
  /// Stops all its threads; kill() still ends it.
  void stop();
  const std::string& folder() const { return folder_; }

 private:
  ServerProcess() = default;
  std::string folder_;
  std::vector<std::string> words_;
  pid_t pid_ = -1;
};

/// A port that was free a moment ago, for servers that take no 0.
uint16_t free_port();
/// Opens the store as soon as its server is up; null after a minute.
std::unique_ptr<Store> open_when_up(const std::string& url);

}  // namespace muster
