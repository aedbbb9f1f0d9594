#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "muster/io/address.h"
#include "muster/io/fd.h"
#include "muster/store/session.h"

namespace muster {

/// A store server (the program store_serve) in a process of its own, with the secret of test_secret(). The process ends
/// with this object, or with the test.
class StoreProcess {
 public:
  struct Options {
    std::string upstream{};  ///< if not empty, the server is a tiered proxy of this server
    Duration link_grace = 5s;
    std::optional<SessionId> session{};
  };
  /// Fails the test if the server does not start.
  explicit StoreProcess(const std::string& upstream = "") : StoreProcess(Options{upstream}) {}
  explicit StoreProcess(const Options& options);
  ~StoreProcess() { kill(); }
  StoreProcess(const StoreProcess&) = delete;
  StoreProcess& operator=(const StoreProcess&) = delete;

  const Address& address() const { return address_; }
  const Address& torch_address() const { return torch_; }
  std::string url() const { return "tcp://" + address_.to_string(); }
  bool runs() const;
  /// Sends SIGKILL. Returns when the process has ended.
  void kill();
  /// Sends SIGSTOP. Returns when all threads of the process are stopped.
  void stop() const;
  /// Sends SIGCONT.
  void resume() const;

  size_t descriptors() const;
  /// The resident memory, in bytes.
  size_t bytes() const;

 private:
  void start(const Options& options);

  pid_t pid_ = -1;
  Fd input_;  // the server ends when this is closed
  Address address_, torch_;
};

}  // namespace muster
