#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "muster/rpc/agent.h"

namespace muster::rpc {

/// The functions that other workers may call. Thread-safe.
class FunctionTable {
 public:
  Result<> add(const std::string& name, Handler handler, FunctionOptions options);
  Result<> add_fallback(Handler handler);
  bool is_idempotent(const std::string& name) const;
  /// Runs the function that the request names. If there is none, the call fails with kNotFound.
  void run(Request request, Responder responder) const;
  /// The names of the functions that have not returned, sorted, for a message.
  std::string running() const;

 private:
  struct Function {
    Function(Handler run, FunctionOptions with) : handler(std::move(run)), options(with) {}
    Handler handler;
    FunctionOptions options;
    mutable std::atomic<int> running = 0;  ///< relaxed: only counted
  };
  // Shared, because a function runs without the lock.
  using FunctionPtr = std::shared_ptr<const Function>;
  FunctionPtr find(const std::string& name) const;
  std::string names() const;

  mutable std::mutex mutex_;  ///< guards the fields below
  std::unordered_map<std::string, FunctionPtr> functions_;
  FunctionPtr fallback_;
};

}  // namespace muster::rpc
