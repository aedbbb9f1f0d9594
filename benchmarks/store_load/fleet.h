#pragma once

#include <functional>
#include <vector>

#include "muster/base/clock.h"
#include "muster/io/address.h"
#include "muster/io/fd.h"
#include "protocol.h"

namespace muster::load {

/// Many clients of one server, driven by the calling thread over epoll. Not thread-safe.
class Fleet {
 public:
  /// The next step of a client, or null when it has no more. It must live until that client's next one.
  using Next = std::function<const Step*(size_t client)>;
  /// Called when a client has a whole reply, with the time since its request was sent.
  using Done = std::function<void(size_t client, Duration taken)>;

  /// `check`: replies must be what the steps say; otherwise only as long (of a server that answers anything).
  static Result<Fleet> create(bool check);

  /// Connects `count` more clients and greets with each, some hundreds at a time.
  Result<> connect(const Address& server, size_t count, const Deadline& deadline, const Done& done = nullptr);
  /// The same, each to the server of its number.
  Result<> connect(const std::function<Address(size_t client)>& server_of, size_t count, const Deadline& deadline,
                   const Done& done = nullptr);
  size_t size() const { return clients_.size(); }
  /// Sends a client's request; drive() waits for its reply. One with an empty request waits alone.
  Result<> begin(size_t client, const Step& step);
  /// Until every client that has begun something is done: with what it began, and then with its `next` steps. The
  /// reason when a client is cut off or gets what it should not, or the deadline passes.
  Result<> drive(const Deadline& deadline, const Next& next = nullptr, const Done& done = nullptr);
  /// Begins with the next step of every client, and drives.
  Result<> run(const Deadline& deadline, const Next& next, const Done& done = nullptr);
  /// Closes all connections at once, so that their ports are free again.
  void reset();

 private:
  struct Client {
    Fd socket;
    bool connected = false;
    const Step* step = nullptr;
    size_t sent = 0;
    size_t received = 0;
    TimePoint began;
  };

  explicit Fleet(Fd epoll, bool check) : epoll_(std::move(epoll)), check_(check) {}
  Result<> open(const Address& server);
  Result<> send(size_t index);
  Result<bool> receive(size_t index);
  Result<> on_event(size_t index, uint32_t events, const Next& next, const Done& done);
  Result<> turn(const Deadline& deadline, const Next& next, const Done& done);

  Fd epoll_;
  bool check_;
  std::vector<Client> clients_;
  size_t active_ = 0;
  Bytes buffer_ = Bytes(256 << 10);
};

}  // namespace muster::load
