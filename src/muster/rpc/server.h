#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "muster/io/loop_driver.h"
#include "muster/rpc/channel.h"
#include "muster/rpc/endpoint.h"
#include "muster/rpc/function_table.h"
#include "muster/rpc/log/call_log.h"
#include "muster/transport/links/link_table.h"

namespace muster::rpc {

/// The calls of other workers to this one: takes requests from their links, runs the functions as tasks of the driver,
/// and sends the results. Not thread-safe: guarded by the driver's lock, unless a comment says otherwise.
class Server {
 public:
  Server(LoopDriver& driver, LinkTable& links, const FunctionTable& functions, const EndpointOptions& options,
         CallLog& log)
      : driver_(driver), links_(links), functions_(functions), options_(options), log_(log) {}

  /// The object that this one is a part of. A function may keep its Responder for longer than that lives.
  void set_owner(std::weak_ptr<void> owner) { owner_ = std::move(owner); }

  void on_linked(Rank rank, Link& link);
  /// The link of the caller has ended, or its process has died. Its calls go on, but count as canceled.
  void on_lost(Rank rank);
  /// Runs a call of this worker to itself. `done` is called without the lock: with the result, and for a one-way call
  /// first when its function starts. The returned function cancels the call. kResourceExhausted if too many wait.
  Result<std::function<void()>> serve_self(Request request, bool one_way, std::function<void(CallResult)> done);
  /// Writes the results that were held back.
  void flush();
  /// True if no function runs and all results were handed to the transport.
  bool is_idle() const;
  /// Counts all calls as canceled.
  void cancel_calls();
  /// Drops all callers. Results of functions that still run are not sent any more.
  void close();

 private:
  /// A worker that calls this one, on one link.
  struct Caller;
  /// A call that this worker runs.
  class ServedCall;
  class RemoteCall;
  class SelfCall;
  using ServedPtr = std::shared_ptr<RemoteCall>;

  static void cancel_calls(Caller& caller);
  static bool remove(RemoteCall& call);
  void drop(Caller& caller);
  Result<> on_announced(Caller& caller, const ParsedMessage& message);
  Result<> on_hello(Caller& caller, const ParsedMessage& hello);
  void on_message(const std::shared_ptr<Caller>& caller, ParsedMessage message);
  void finish(RemoteCall& call, CallResult result, LoggedCall& logged);
  void acknowledge(RemoteCall& call);
  void report_start(RemoteCall& call);
  void write(RemoteCall& call, Kind kind, const Message& message);
  void on_written(Caller& caller);
  bool hold(RemoteCall& call);
  void release_held(Caller& caller);

  LoopDriver& driver_;
  LinkTable& links_;
  const FunctionTable& functions_;
  const EndpointOptions& options_;
  CallLog& log_;
  std::weak_ptr<void> owner_;
  std::unordered_map<Rank, std::shared_ptr<Caller>> callers_;
  std::vector<std::shared_ptr<Caller>> corked_;  ///< callers with results that flush() will write
  size_t running_ = 0;                           ///< calls that have not finished their Responder
  size_t self_calls_ = 0;                        ///< those of this worker to itself
  bool closed_ = false;
};

}  // namespace muster::rpc
