#pragma once

#include <signal.h>

#include <memory>
#include <string>
#include <vector>

#include "muster/store/store.h"

namespace muster {

/// A server of somebody else's that a test starts: in a folder of its own, ended with the test and by its own pid.
class ServerProcess {
 public:
  /// `words`: program and arguments; "{folder}" stands for the folder. Null where the program is not installed: the
  /// test skips then, but fails where MUSTER_REQUIRE_STORES is set.
  static std::unique_ptr<ServerProcess> start(std::vector<std::string> words);
  ~ServerProcess();
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  /// Ends it with SIGKILL, and starts it again with what its folder holds.
  void kill();
  void restart();
  /// It is there, and none of its threads runs any more; kill() ends it all the same.
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
