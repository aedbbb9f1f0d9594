#pragma once

#include <time.h>

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "muster/base/rate_limited_log.h"
#include "muster/io/connection.h"
#include "muster/store/server/backend.h"
#include "muster/store/session.h"
#include "muster/store/stat.h"

namespace muster {

using ListenerId = uint64_t;

/// One of a server's threads: it drives a loop, and it alone touches the clients that it was given. What concerns the
/// clients of another loop is posted there. Private to the server.
class ServerLoop {
 public:
  struct Options {
    unsigned index = 0, count = 1;  ///< of the server's loops
    size_t max_reply_queue = 0;
    Duration stall_timeout{};
    Duration request_timeout{};
    Duration link_grace{};  ///< how long a proxy's session is kept without a link
    Duration lease_time{};
  };
  /// What a loop needs to know of the others.
  struct Others {
    std::function<void(unsigned index, Replies)> deliver;
    std::function<StoreStat()> stat;  ///< null: kStat goes to the backend
  };
  struct AcceptedConnection {
    Connection connection;
    bool plain = false;  ///< speaks PyTorch's protocol
    ListenerId listener = 0;
    Key prefix;
    std::optional<SessionId> session;  ///< of a proxy
  };

  ServerLoop(Options options, Others others, std::unique_ptr<Loop> loop);
  ~ServerLoop();

  /// Before run() only: the thread has no owner yet.
  Loop& loop() { return *loop_; }
  void set_backend(std::unique_ptr<Backend> backend) { backend_ = std::move(backend); }
  /// Takes replies for this loop's clients and for others', on the loop's thread.
  Backend::Deliver deliverer();
  /// Starts the thread.
  void run();
  /// Ends it; its clients stay until this object goes.
  void stop();

  // The rest is thread-safe.
  void admit(AcceptedConnection newcomer);
  void deliver(Replies replies);
  /// Closes the connections of a listener's clients.
  void close_clients_of(ListenerId listener);
  /// How many clients it was given that have not left.
  size_t load() const { return load_; }
  /// Adds this loop's figures.
  void add_to(StoreStat& stat) const;

 private:
  struct Client;
  // Counted by the loop's thread alone, read by any.
  struct Counters {
    std::array<std::atomic<uint64_t>, 256> operations{};
    std::atomic<uint64_t> clients{0}, bytes_in{0}, bytes_out{0}, messages_in{0}, messages_out{0};
  };
  struct Inbox {
    std::vector<AcceptedConnection> newcomers;
    Replies replies;
    std::vector<ListenerId> closed;
    bool empty() const { return newcomers.empty() && replies.empty() && closed.empty(); }
  };

  template <class Add>
  void post(Add add);
  void take_inbox();
  void add_client(AcceptedConnection newcomer);
  Client& new_client();
  Client& client_of(const SessionId& session);
  void on_input(Client& client, ByteView bytes);
  void on_frames(Client& client, ByteView bytes);
  bool take_request(Client& client);
  void arm_timeout(Client& client);
  void look_for_the_rest();
  void submit(Client& client, Request request);
  void distribute(Replies&& replies);
  void encode(const Reply& reply);
  void mark_dirty(Client& client);
  size_t flush();
  void flush_soon();
  bool is_crowded() const;
  void coalesce() const;
  void write_frames(Client& client);
  void on_lost(Client& client, const Error& why);
  size_t proxies() const { return sessions_.size() * options_.count; }  // spread evenly over the loops
  void check_sessions();
  void lose(Client& client, const Error& why);
  void end_leases(const Client& client);
  void bury();

  const Options options_;
  const Others others_;
  const std::unique_ptr<Loop> loop_;
  std::unordered_map<ClientId, std::unique_ptr<Client>> clients_;
  std::map<SessionId, Client*> sessions_;
  bool looks_after_ = false;
  std::vector<std::unique_ptr<Client>> closed_clients_;
  std::deque<std::pair<TimePoint, ClientId>> expected_;  // to go on with a request, and since when
  std::vector<Client*> dirty_;                           // to be flushed; those in the graveyard too
  std::vector<Replies> remote_replies_;                  // by loop, sent at the end of a batch
  RateLimitedLog strangers_;                                   // whoever comes to a port that asks for no proof
  Client* current_client_ = nullptr;                     // whose request is being carried out
  bool in_batch_ = false;
  bool flushes_soon_ = false;
  TimePoint next_flush_{};
  static constexpr TimePoint kNever{INT64_MAX};
  TimePoint held_until_ = kNever;  // the first of the proxies that want a pause
  ClientId next_client_;
  std::unique_ptr<Backend> backend_;
  Counters counters_;
  std::atomic<size_t> load_ = 0;
  std::mutex mutex_;
  Inbox inbox_;  // guarded by mutex_
  std::atomic<bool> stop_ = false;
  std::atomic<std::optional<clockid_t>> clock_{};  // of the thread's CPU time, which other threads ask for
  std::thread thread_;
};

}  // namespace muster
