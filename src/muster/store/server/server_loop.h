#pragma once

#include <time.h>

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "muster/io/connection.h"
#include "muster/io/rate_limited_log.h"
#include "muster/store/server/backend.h"
#include "muster/store/server/expiry.h"
#include "muster/store/server/server.h"
#include "muster/store/session.h"
#include "muster/store/stat.h"

namespace muster {

using ListenerId = uint64_t;

/// One of a server's threads, which drives one event loop. Each client belongs to one loop, and only that loop's thread
/// touches it. Calls that concern a client of another loop are posted there. Private to the server.
///
/// It is one large class, because one batch of input goes through all of its tables: requests of many clients are
/// carried out, replies are gathered for other loops, and frames leave together at the end.
class ServerLoop {
 public:
  /// How a loop reaches the other loops.
  struct Others {
    std::function<void(unsigned index, Replies)> deliver;
    std::function<StoreStat()> stat;  ///< null: kStat goes to the backend
  };
  struct AcceptedConnection {
    Connection connection;
    bool tcpstore = false;  ///< uses PyTorch's protocol
    ListenerId listener = 0;
    Key prefix;
    std::optional<SessionId> session;  ///< of a proxy
  };

  /// Borrows the options. This is loop `index` of `count`.
  ServerLoop(const StoreServerOptions& options, unsigned index, unsigned count, Others others,
             std::unique_ptr<Loop> loop);
  ~ServerLoop();

  /// Only before run(). Later, other threads may call only its thread-safe functions, such as Loop::post().
  Loop& loop() { return *loop_; }
  void set_backend(std::unique_ptr<Backend> backend) { backend_ = std::move(backend); }
  /// Takes replies for the clients of any loop, on this loop's thread.
  Backend::Deliver deliverer();
  /// Starts the thread.
  void run();
  /// Ends the thread. The clients stay until this object is destroyed.
  void stop();

  // The functions below are thread-safe.
  void admit(AcceptedConnection accepted);
  void deliver(Replies replies);
  /// Closes the connections of a listener's clients.
  void close_clients_of(ListenerId listener);
  /// The number of open connections that were assigned to this loop.
  size_t load() const { return load_; }
  /// Adds this loop's statistics to `stat`.
  void add_to(StoreStat& stat) const;

 private:
  struct Client;
  // Only the loop's thread writes the counters; any thread may read them. Relaxed order is enough, because no reader
  // relies on the order of different counters.
  struct Counters {
    std::array<std::atomic<uint64_t>, 256> operations{};
    std::atomic<uint64_t> clients{0}, bytes_in{0}, bytes_out{0}, messages_in{0}, messages_out{0};
  };
  struct Inbox {
    std::vector<AcceptedConnection> accepted;
    Replies replies;
    bool empty() const { return accepted.empty() && replies.empty(); }
  };

  template <class Add>
  void post(Add add);
  void take_inbox();
  void add_client(AcceptedConnection accepted);
  Client& new_client();
  Client& proxy_client(const SessionId& session);
  void on_input(Client& client, ByteView bytes);
  void on_frames(Client& client, ByteView bytes);
  bool take_request(Client& client);
  void arm_request_timeout();
  void submit(Client& client, Request request);
  void distribute(Replies&& replies);
  void encode(const Reply& reply);
  void mark_dirty(Client& client);
  size_t flush();
  void schedule_flush();
  bool has_many_proxies() const;
  void coalesce() const;
  void write_frames(Client& client);
  void on_lost(Client& client, const Error& why);
  // An estimate for the whole server: sessions are spread evenly over the loops.
  size_t proxies() const { return sessions_.size() * count_; }
  void check_sessions();
  void lose(Client& client, const Error& why);

  const StoreServerOptions& options_;
  const unsigned index_, count_;
  const Others others_;
  const std::unique_ptr<Loop> loop_;
  std::unordered_map<ClientId, std::unique_ptr<Client>> clients_;
  std::map<SessionId, Client*> sessions_;
  bool checks_sessions_ = false;
  std::vector<std::unique_ptr<Client>> closed_clients_;
  RequestTimeouts request_timeouts_;
  std::vector<Client*> dirty_;           // clients with something to send; may include closed clients
  std::vector<Replies> remote_replies_;  // replies for the clients of each loop, sent at the end of a batch
  RateLimitedLog unauthenticated_log_;   // for clients of PyTorch's protocol
  Client* current_client_ = nullptr;     // the client whose request submit() carries out
  bool in_batch_ = false;
  bool flush_scheduled_ = false;
  TimePoint next_flush_{};
  static constexpr TimePoint kNever{INT64_MAX};
  TimePoint paced_flush_ = kNever;  // when the first proxy that does not want a frame yet may get it
  ClientId next_client_;            // grows by count_, so a client's number modulo count_ is the index of its loop
  std::unique_ptr<Backend> backend_;
  Counters counters_;
  std::atomic<size_t> load_ = 0;
  std::mutex mutex_;
  Inbox inbox_;  // guarded by mutex_
  std::atomic<bool> stop_ = false;
  std::atomic<std::optional<clockid_t>> cpu_clock_{};  // the thread's clock; atomic because other threads read it
  std::thread thread_;
};

}  // namespace muster
