#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>

#include "muster/base/check.h"
#include "muster/io/connect/handshake_queue.h"
#include "muster/io/connect/negotiation.h"
#include "muster/io/rate_limited_log.h"
#include "muster/io/socket.h"

namespace muster {
namespace {

constexpr Duration kExhaustedPause = 100ms;  // before the next try after descriptors or memory ran out
constexpr int kAcceptsPerTurn = 64;          // so that a flood of new connections leaves time for the others

/// The inode of a path socket's file; 0 for another address, and if the file is gone.
ino_t inode_of(const Address& address) {
  struct stat status;
  const bool is_path = address.is_unix() && !address.host().starts_with('@');
  return is_path && stat(address.host().c_str(), &status) == 0 ? status.st_ino : 0;
}

/// It has many small functions, one for each event of a handshake: input, silence, a full table, a failed accept().
class SocketAcceptor final : public Acceptor {
 public:
  SocketAcceptor(Loop& loop, Fd listener, Address address, Options options, Handler handler)
      : loop_(loop),
        listener_(std::move(listener)),
        address_(std::move(address)),
        options_(std::move(options)),
        handler_(std::make_shared<const Handler>(std::move(handler))),
        inode_(inode_of(address_)),
        refusal_log_(loop.clock()),
        queue_(options_.max_pending) {}

  ~SocketAcceptor() override {
    loop_.unwatch(listener_.get());
    loop_.cancel(resume_timer_);
    loop_.cancel(room_timer_);
    for (const auto& [fd, pending] : pending_) {
      loop_.unwatch(fd);
      loop_.cancel(pending.timeout);
    }
    // Removes the file of a path socket, unless another process has replaced it.
    if (inode_ != 0 && inode_of(address_) == inode_) unlink(address_.host().c_str());
  }

  Result<> start() {
    return loop_.watch(listener_.get(), EPOLLIN, [this](uint32_t) { on_readable(); });
  }

  Address address() const override { return address_; }
  const std::string& last_refusal() const override { return last_refusal_; }

 private:
  struct Pending {
    Negotiation negotiation;
    Address peer;
    std::string name;
    TimePoint since;
    Loop::TimerId timeout = 0;
  };

  void on_readable() {
    const std::weak_ptr<const Handler> alive = handler_;
    for (int i = 0; i < kAcceptsPerTurn; ++i) {
      if (pending_.size() >= options_.max_pending && !may_evict()) return wait_for_eviction();
      Address peer;
      auto accepted = accept_from(listener_.get(), &peer);
      if (!accepted && accepted.error().code == ErrorCode::kResourceExhausted) {
        if (!queue_.next()) {
          const auto refused = refuse_connection();
          if (!refused) return pause(refused.error());
          if (!*refused) break;
        } else if (!is_ready(listener_.get())) {
          break;
        } else if (may_evict()) {
          evict_one();
          if (alive.expired()) return;  // a handler has destroyed this object
        } else {
          return wait_for_eviction();
        }
        continue;
      }
      if (!accepted) return pause(accepted.error());
      if (!*accepted) break;
      while (pending_.size() >= options_.max_pending && may_evict()) {
        evict_one();
        if (alive.expired()) return;
      }
      if (options_.plain) {
        accept_plain(std::move(**accepted), peer);
      } else {
        begin_handshake(std::move(**accepted), peer);
      }
      if (alive.expired()) return;
    }
    listen();
  }

  bool may_evict() const {
    const auto candidate = queue_.next();
    return candidate && candidate->due <= loop_.clock().now();
  }

  /// Closes the next connection of queue_ to make room for a new one. If that connection has just sent bytes, continues
  /// its handshake instead. May destroy this object, as advance() may.
  void evict_one() {
    const int fd = queue_.next()->id;
    if (is_ready(fd)) return advance(fd, EPOLLIN);
    const bool silent = queue_.is_silent(fd);
    drop(fd, fmt::format("too many unauthenticated connections are open, and this one {}",
                         silent ? "is silent" : "has stalled"));
  }

  /// New connections wait in the kernel's backlog until a pending one may be evicted.
  void wait_for_eviction() {
    loop_.cancel(room_timer_);
    room_timer_ = loop_.at(queue_.next()->due, [this] { resume(room_timer_); });
    listen();
  }

  /// Watches the listener only while a connection can be accepted. Otherwise new connections wait in the kernel's
  /// backlog.
  void listen() {
    const bool waits = resume_timer_ != 0 || room_timer_ != 0;
    const auto changed = loop_.modify(listener_.get(), waits ? 0 : uint32_t{EPOLLIN});
    MUSTER_CHECK(changed.has_value(), changed.error().message);
  }

  /// The timer has expired or is not needed any more.
  void resume(Loop::TimerId& timer) {
    loop_.cancel(std::exchange(timer, 0));
    listen();
  }

  static bool is_ready(int fd) {
    pollfd entry{fd, POLLIN, 0};
    return poll(&entry, 1, 0) > 0;
  }

  /// Refuses one connection when the process has no descriptor left, with the help of the reserved one. So the client
  /// gets the reason at once instead of waiting in the backlog. False if no connection waits there.
  Result<bool> refuse_connection() {
    reserve_.reset();
    Address peer;
    auto accepted = accept_from(listener_.get(), &peer);
    const bool connected = accepted && *accepted;
    if (connected) {
      const int fd = (*accepted)->get();
      if (!options_.plain) Negotiation::send_refusal(fd, Handshake::Refusal::kFull);
      refused(name_of(fd, peer), "this process has no file descriptor left; raise its limit (ulimit -n)");
      accepted->reset();
    }
    reserve_ = open_reserve();
    if (!accepted) return tl::unexpected(accepted.error());
    return connected;
  }

  /// Stops accepting for a while, for example when the kernel is out of memory. The connection stays in the backlog, so
  /// another try at once would spin.
  void pause(const Error& error) {
    refusal_log_.warn(fmt::format("{} cannot accept connections for now: {}", address_.to_string(), error.message));
    resume_timer_ = loop_.after(kExhaustedPause, [this] { resume(resume_timer_); });
    listen();
  }

  void accept_plain(Fd socket, const Address& peer) {
    if (!is_allowed_user(socket.get(), peer)) return;
    const auto handler = handler_;
    (*handler)(Connection{plain_stream(std::move(socket)), {}, peer, {}});
  }

  void begin_handshake(Fd socket, const Address& peer) {
    const int fd = socket.get();
    if (!is_allowed_user(fd, peer)) return;
    const std::string name = name_of(fd, peer);
    auto begun = Negotiation::begin(std::move(socket), Handshake::Side::kServer, options_.credentials, options_.hello);
    if (!begun)
      return refusal_log_.warn(fmt::format("cannot start the handshake with {}: {}", name, begun.error().message));
    const auto watched = loop_.watch(fd, EPOLLIN, [this, fd](uint32_t events) { advance(fd, events); });
    if (!watched)
      return refusal_log_.warn(fmt::format("cannot start the handshake with {}: {}", name, watched.error().message));
    const TimePoint now = loop_.clock().now();
    const auto first = std::min(options_.greeting_timeout, options_.handshake_timeout);
    const auto timeout = loop_.at(now + first, [this, fd] { check_greeting(fd); });
    pending_.emplace(fd, Pending{std::move(*begun), peer, name, now, timeout});
    queue_.add(fd, network_of(peer), now);
    if (is_ready(fd)) advance(fd, EPOLLIN);  // a muster peer's greeting has usually arrived
  }

  void check_greeting(int fd) {
    Pending& pending = pending_.at(fd);
    const bool silent = queue_.is_silent(fd) && !is_ready(fd);
    if (silent && options_.greeting_timeout < options_.handshake_timeout) {
      return drop(fd, fmt::format("it sent nothing within {} s", seconds(options_.greeting_timeout)));
    }
    pending.timeout = loop_.at(pending.since + options_.handshake_timeout, [this, fd] { time_out(fd); });
  }

  void time_out(int fd) {
    const std::weak_ptr<const Handler> alive = handler_;
    if (is_ready(fd)) advance(fd, EPOLLIN);  // the loop may not have run for a while
    if (alive.expired() || !pending_.contains(fd)) return;
    drop(fd, fmt::format("it did not finish the handshake within {} s", seconds(options_.handshake_timeout)));
  }

  /// On a Unix socket, the kernel tells which user the peer belongs to.
  bool is_allowed_user(int fd, const Address& peer) {
    if (!address_.is_unix()) return true;
    const auto who = unix_peer(fd);
    if (who && (who->uid == geteuid() || who->uid == 0)) return true;
    refused(name_of(fd, peer), who ? fmt::format("it belongs to user {}", who->uid) : who.error().message);
    if (!options_.plain) Negotiation::send_refusal(fd, Handshake::Refusal::kWrongUser);
    return false;
  }

  static Fd open_reserve() { return Fd(open("/dev/null", O_RDONLY | O_CLOEXEC)); }

  std::string name_of(int fd, const Address& peer) const {
    if (!address_.is_unix()) return peer.to_string();
    const auto who = unix_peer(fd);
    return fmt::format("process {}", who ? who->pid : 0);
  }

  // May call the handler, which may destroy this object.
  void advance(int fd, uint32_t events) {
    Pending& pending = pending_.at(fd);
    if ((events & EPOLLIN) != 0) queue_.on_bytes(fd, loop_.clock().now());
    const auto done = pending.negotiation.advance();
    if (!done) return refuse(fd, done.error().message);
    if (!*done) {
      const auto changed = loop_.modify(fd, pending.negotiation.interest());
      MUSTER_CHECK(changed.has_value(), changed.error().message);
      return;
    }
    Connection connection = std::move(pending.negotiation).finish(pending.peer);
    queue_.on_authenticated(fd);
    forget(fd);
    const auto handler = handler_;
    (*handler)(std::move(connection));
  }

  /// Refuses a connection and asks its peer to try again, because it may be a muster peer that was too slow.
  void drop(int fd, const std::string& reason) {
    pending_.at(fd).negotiation.reject(Handshake::Refusal::kBusy);
    refuse(fd, reason);
  }

  void refuse(int fd, const std::string& reason) {
    refused(pending_.at(fd).name, reason);
    queue_.remove(fd);
    forget(fd);
  }

  void refused(const std::string& name, const std::string& reason) {
    last_refusal_ = fmt::format("{} refused {}: {}", address_.to_string(), name, reason);
    refusal_log_.warn(last_refusal_);
  }

  void forget(int fd) {
    loop_.unwatch(fd);
    loop_.cancel(pending_.at(fd).timeout);
    pending_.erase(fd);
    if (room_timer_ != 0) resume(room_timer_);
  }

  Loop& loop_;
  Fd listener_;
  Fd reserve_ = open_reserve();
  const Address address_;
  const Options options_;
  // Shared, so that a handler which destroys its acceptor survives until it returns.
  const std::shared_ptr<const Handler> handler_;
  const ino_t inode_;
  RateLimitedLog refusal_log_;
  std::string last_refusal_;
  Loop::TimerId resume_timer_ = 0;  // 0, or the last accept failed
  Loop::TimerId room_timer_ = 0;    // 0, or no connection may be evicted yet
  std::unordered_map<int, Pending> pending_;
  HandshakeQueue queue_;  // the same connections, and which one is evicted next
};

}  // namespace

Result<std::unique_ptr<Acceptor>> Acceptor::create(Loop& loop, const Address& address, Options options,
                                                   Handler handler) {
  MUSTER_CHECK(handler != nullptr && options.max_pending > 0, "an acceptor needs a handler and room");
  MUSTER_ASSIGN(Fd listener, listen_on(address));
  MUSTER_ASSIGN(Address bound, local_address(listener.get()));
  auto acceptor = std::make_unique<SocketAcceptor>(loop, std::move(listener), std::move(bound), std::move(options),
                                                   std::move(handler));
  MUSTER_TRY(acceptor->start());
  return acceptor;
}

}  // namespace muster
