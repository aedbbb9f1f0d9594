#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "muster/rpc/agent.h"
#include "muster/rpc/refs/held_refs.h"
#include "muster/rpc/refs/owned_refs.h"
#include "muster/rpc/refs/releases.h"

namespace muster::rpc {

class RefService;

/// A reference to a value at one worker, its owner. The reference ends when no worker holds it any more. Thread-safe;
/// copies are made by sharing it. Its end releases it at the owner, without waiting.
class Ref {
 public:
  ~Ref();
  Ref(const Ref&) = delete;

  const std::string& owner() const { return owner_; }
  const RefId& id() const { return id_; }
  const std::shared_ptr<RefService>& service() const { return service_; }
  bool is_owner() const;
  /// "reference 3.17 at worker "ps"".
  std::string to_string() const;

 private:
  friend class RefService;
  Ref(std::shared_ptr<RefService> service, std::string owner, RefId id)
      : service_(std::move(service)), owner_(std::move(owner)), id_(id) {}

  const std::shared_ptr<RefService> service_;
  const std::string owner_;
  const RefId id_;
};
using RefPtr = std::shared_ptr<Ref>;

/// A RefId in the arguments of a call: creator:i32 number:u64.
void put_ref_id(Writer& out, const RefId& id);
Result<RefId> get_ref_id(Reader& in);

/// The references of one worker: those that it owns, and those that it holds. owned_refs.h explains the protocol.
/// Thread-safe. Values are destroyed without a lock, on any thread.
class RefService : public std::enable_shared_from_this<RefService> {
 public:
  struct Options {
    /// A worker that died, or cannot be reached for so long, does not hold references any more.
    Duration lease = std::chrono::seconds(60);
  };
  /// Adds the functions of the protocol to the agent. One service for each agent.
  static Result<std::shared_ptr<RefService>> start(std::shared_ptr<Agent> agent, Options options);
  ~RefService();

  /// A new reference to a value that `owner` will have. If that is another worker, send it a call that begins with
  /// accept() there, and keep the reference until the call has ended.
  RefPtr create(const std::string& owner);
  /// At the owner: the reference that another worker has created.
  void accept(const RefId& id, const WorkerInfo& creator);
  /// At the owner: the value, or the reason why there is none. Ignored if nobody holds the reference any more.
  void set_value(const RefId& id, std::shared_ptr<RefValue> value);
  /// At the owner: null if there is no value yet. kNotFound if nobody holds the reference.
  Result<std::shared_ptr<RefValue>> value(const RefId& id);
  /// At the owner: calls back once there is a value, or at once. kNotFound in place of calling back. Some time after
  /// given_up() has become true, the callback is dropped.
  using Callback = std::function<void(std::shared_ptr<RefValue>)>;
  Result<> when_ready(const RefId& id, Callback callback, std::function<bool()> given_up);

  /// Begins to grant references to `receiver`, which must be done before a message with them is sent. Returns the calls
  /// to owners that are other workers. The references must be kept until a call was handled, or until a reply is sent.
  enum class Carrier { kCall, kReply };
  std::vector<Future> grant(const std::vector<RefPtr>& refs, const std::string& receiver, Carrier carrier,
                            Duration timeout = CallOptions{}.timeout);
  /// A message with a reference has arrived. `sender`: the id of the worker that sent it as an argument, or kReplied.
  /// kNotFound if this worker owns the reference, and nobody holds it.
  Result<RefPtr> receive(const std::string& owner, const RefId& id, int sender);
  static constexpr int kReplied = -1;

  /// Drops a reference on the service's own thread: for a thread that may hold a lock of the agent, or any other one.
  static void drop_later(RefPtr ref);

  /// Ends the service: references that are dropped later are not released. Values are destroyed.
  void stop();
  const WorkerInfo& self() const { return agent_->self(); }
  Agent& agent() const { return *agent_; }
  /// References that this worker owns and holds. For tests.
  std::pair<size_t, size_t> counts() const;

 private:
  friend class Ref;
  RefService(std::shared_ptr<Agent> agent, Options options);
  Result<> add_functions();
  Error not_found(const RefId& id) const;
  void drop(const std::string& owner, const RefId& id);
  void send_release(const std::string& owner, const RefId& id, uint64_t grants);
  void keep_leases();
  void renew_all();

  struct Waiter {
    Callback callback;
    std::function<bool()> given_up;
  };
  using Waiters = std::unordered_map<RefId, std::vector<Waiter>>;
  /// What the service's thread waits for. It shares this, because it may be the one that drops the last reference to
  /// the service.
  struct Wake {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<RefPtr> dropped;
    bool stop = false;
  };
  /// The callbacks of calls share it, because one may come after the service has ended.
  struct Releases {
    std::mutex mutex;
    SentReleases sent;
  };
  static void run_thread(const std::weak_ptr<RefService>& weak, Wake& wake, Duration interval);

  const std::shared_ptr<Agent> agent_;
  const Options options_;
  const pid_t pid_;           ///< a forked child has neither the thread nor the calls of its parent
  mutable std::mutex mutex_;  ///< guards the fields below
  OwnedRefs owned_;
  HeldRefs held_;
  CountedReleases counted_;
  Waiters waiting_;
  uint64_t created_ = 0;
  bool stopped_ = false;
  const std::shared_ptr<Releases> releases_ = std::make_shared<Releases>();
  const std::shared_ptr<Wake> wake_ = std::make_shared<Wake>();
  std::thread background_;  ///< keeps the leases
};

}  // namespace muster::rpc
