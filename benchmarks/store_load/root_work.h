#pragma once

#include <memory>
#include <string>

#include "cases.h"
#include "muster/store/store.h"

namespace muster::load {

/// What a root did: seconds, requests and replies, bytes of them.
struct RootWork {
  double cpu = 0;
  double messages_in = 0, messages_out = 0;
  double bytes_in = 0, bytes_out = 0;
};
Figures figures_of(const RootWork& work, Duration time);

/// MUSTER_SECRET, given in hex; none where it is not set.
Result<Bytes> secret_of_job();

/// Counts from its creation on. A server without muster's dialect tells nothing but its CPU time.
class RootMeter {
 public:
  /// `url`: where the root speaks muster's dialect, with secret_of_job(); may be empty.
  static Result<RootMeter> create(const std::string& url, pid_t pid, const Deadline& deadline);
  bool asks() const { return store_ != nullptr; }
  Result<RootWork> work();

 private:
  RootMeter(std::unique_ptr<Store> store, pid_t pid, const Deadline& deadline)
      : store_(std::move(store)), server_(pid), deadline_(deadline) {}
  Result<RootWork> since_the_beginning();

  std::unique_ptr<Store> store_;
  ServerProcess server_;
  Deadline deadline_;
  RootWork before_;
};

}  // namespace muster::load
