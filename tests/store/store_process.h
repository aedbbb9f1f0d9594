#pragma once

#include <sys/types.h>

#include <string>

#include "muster/io/address.h"
#include "muster/io/fd.h"

namespace muster {

/// A store server (the program store_serve) in a process of its own, with the secret of test_secret(). It ends with
/// this object, or with the test.
class StoreProcess {
 public:
  /// With an upstream: a tiered proxy of it. Fails the test if it does not start.
  explicit StoreProcess(const std::string& upstream = "");
  ~StoreProcess() { kill(); }
  StoreProcess(const StoreProcess&) = delete;
  StoreProcess& operator=(const StoreProcess&) = delete;

  const Address& address() const { return address_; }
  const Address& torch_address() const { return torch_; }
  std::string url() const { return "tcp://" + address_.to_string(); }
  bool runs() const;
  /// SIGKILL; returns when it is gone.
  void kill();
  /// SIGSTOP; returns when none of its threads runs. And SIGCONT.
  void stop();
  void resume();

  size_t descriptors() const;
  /// Of memory, resident.
  size_t bytes() const;

 private:
  void start(const std::string& upstream);

  pid_t pid_ = -1;
  Fd input_;  // it ends with it
  Address address_, torch_;
};

}  // namespace muster
