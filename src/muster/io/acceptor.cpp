#include <fcntl.h>
#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <optional>
#include <unordered_map>

#include "muster/base/check.h"
#include "muster/base/log.h"
#include "muster/io/negotiation.h"
#include "muster/io/socket.h"

namespace muster {
namespace {

constexpr Duration kQuietTime = 1s;          // between two lines about strangers
constexpr Duration kExhaustedPause = 100ms;  // before another try when descriptors or memory have run out
constexpr int kAcceptsPerTurn = 64;          // so that a flood of newcomers leaves time for the others

/// Writes at most one warning per kQuietTime and says how many it left out.
class QuietLog {
 public:
  explicit QuietLog(const Clock& clock) : clock_(clock) {}
  void warn(const std::string& message) {
    const TimePoint now = clock_.now();
    if (last_ && now - *last_ < kQuietTime) {
      ++left_out_;
      return;
    }
    const std::string more = left_out_ == 0 ? "" : fmt::format(" ({} more like this since the last line)", left_out_);
    log(LogLevel::kWarning, message + more);
    last_ = now;
    left_out_ = 0;
  }

 private:
  const Clock& clock_;
  std::optional<TimePoint> last_;
  size_t left_out_ = 0;
};

/// The file of a path socket, removed with the listener unless another process has put its own there.
class SocketFile {
 public:
  explicit SocketFile(const Address& address) {
    if (!address.is_unix() || address.host().starts_with('@')) return;
    struct stat status;
    if (stat(address.host().c_str(), &status) != 0) return;
    path_ = address.host();
    inode_ = status.st_ino;
  }
  ~SocketFile() {
    struct stat status;
    if (!path_.empty() && stat(path_.c_str(), &status) == 0 && status.st_ino == inode_) unlink(path_.c_str());
  }
  SocketFile(const SocketFile&) = delete;
  SocketFile& operator=(const SocketFile&) = delete;

 private:
  std::string path_;
  ino_t inode_ = 0;
};

class SocketAcceptor final : public Acceptor {
 public:
  SocketAcceptor(Loop& loop, Fd listener, Address address, Options options, Handler handler)
      : loop_(loop),
        listener_(std::move(listener)),
        address_(std::move(address)),
        options_(std::move(options)),
        handler_(std::make_shared<const Handler>(std::move(handler))),
        file_(address_),
        strangers_(loop.clock()) {}

  ~SocketAcceptor() override {
    loop_.unwatch(listener_.get());
    loop_.cancel(resume_timer_);
    for (const auto& [fd, pending] : pending_) {
      loop_.unwatch(fd);
      loop_.cancel(pending.timeout);
    }
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
    Loop::TimerId timeout = 0;
  };

  void on_readable() {
    for (int i = 0; i < kAcceptsPerTurn && pending_.size() < options_.max_pending; ++i) {
      Address peer;
      auto accepted = accept_from(listener_.get(), &peer);
      if (!accepted && accepted.error().code == ErrorCode::kResourceExhausted) {
        const auto refused = refuse_newcomer();
        if (!refused) return pause(refused.error());
        if (!*refused) break;
        continue;
      }
      if (!accepted) return pause(accepted.error());
      if (!*accepted) break;
      if (!options_.plain) {
        greet(std::move(**accepted), peer);
        continue;
      }
      const std::weak_ptr<const Handler> alive = handler_;
      greet_plain(std::move(**accepted), peer);
      if (alive.expired()) return;  // the handler has destroyed this object
    }
    listen_if_room();
  }

  /// No more room, no more events: the rest waits in the kernel's backlog.
  void listen_if_room() {
    const bool open = !paused_ && pending_.size() < options_.max_pending;
    const auto changed = loop_.modify(listener_.get(), open ? uint32_t{EPOLLIN} : 0);
    MUSTER_CHECK(changed.has_value(), changed.error().message);
  }

  /// Out of descriptors: one is kept back, so that newcomers learn it at once instead of waiting in the backlog. False
  /// when nobody waits there.
  Result<bool> refuse_newcomer() {
    reserve_.reset();
    Address peer;
    auto accepted = accept_from(listener_.get(), &peer);
    const bool somebody = accepted && *accepted;
    if (somebody) {
      const int fd = (*accepted)->get();
      if (!options_.plain) tell(fd, Handshake::Refusal::kFull);
      refused(name_of(fd, peer), "this process has no file descriptor left; raise its limit (ulimit -n)");
    }
    if (somebody) accepted->reset();
    reserve_ = open_reserve();
    if (!accepted) return tl::unexpected(accepted.error());
    return somebody;
  }

  /// Out of memory, say: the connection stays in the backlog, and asking again at once would spin.
  void pause(const Error& error) {
    strangers_.warn(fmt::format("{} cannot accept connections for now: {}", address_.to_string(), error.message));
    paused_ = true;
    listen_if_room();
    resume_timer_ = loop_.after(kExhaustedPause, [this] {
      paused_ = false;
      listen_if_room();
    });
  }

  void greet_plain(Fd socket, const Address& peer) {
    if (!may_connect(socket.get(), peer)) return;
    const auto handler = handler_;
    (*handler)(Connection{plain_stream(std::move(socket)), {}, peer, {}});
  }

  void greet(Fd socket, const Address& peer) {
    const int fd = socket.get();
    if (!may_connect(fd, peer)) return;
    const std::string name = name_of(fd, peer);
    auto begun = Negotiation::begin(std::move(socket), Handshake::Side::kServer, options_.credentials, options_.hello);
    if (!begun) return strangers_.warn(fmt::format("cannot greet {}: {}", name, begun.error().message));
    const auto watched = loop_.watch(fd, EPOLLIN, [this, fd](uint32_t) { advance(fd); });
    if (!watched) return strangers_.warn(fmt::format("cannot greet {}: {}", name, watched.error().message));
    const auto timeout = loop_.after(options_.handshake_timeout, [this, fd] {
      drop(fd, fmt::format("it did not finish the handshake within {} s", seconds(options_.handshake_timeout)));
    });
    pending_.emplace(fd, Pending{std::move(*begun), peer, name, timeout});
  }

  /// A Unix socket's peer has a uid that the kernel vouches for.
  bool may_connect(int fd, const Address& peer) {
    if (!address_.is_unix()) return true;
    const auto who = unix_peer(fd);
    if (who && (who->uid == geteuid() || who->uid == 0)) return true;
    refused(name_of(fd, peer), who ? fmt::format("it belongs to user {}", who->uid) : who.error().message);
    if (options_.plain) return false;
    tell(fd, Handshake::Refusal::kWrongUser);
    return false;
  }

  static void tell(int fd, Handshake::Refusal refusal) {
    const Bytes reason = Handshake::refuse(refusal);
    (void)send(fd, reason.data(), reason.size(), MSG_NOSIGNAL);  // it fits a fresh socket's buffer
  }

  static Fd open_reserve() { return Fd(open("/dev/null", O_RDONLY | O_CLOEXEC)); }

  std::string name_of(int fd, const Address& peer) const {
    if (!address_.is_unix()) return peer.to_string();
    const auto who = unix_peer(fd);
    return fmt::format("process {}", who ? who->pid : 0);
  }

  void advance(int fd) {
    Pending& pending = pending_.at(fd);
    const auto done = pending.negotiation.advance();
    if (!done) return drop(fd, done.error().message);
    if (!*done) {
      const auto changed = loop_.modify(fd, pending.negotiation.interest());
      MUSTER_CHECK(changed.has_value(), changed.error().message);
      return;
    }
    Connection connection = std::move(pending.negotiation).finish(pending.peer);
    forget(fd);
    const auto handler = handler_;
    (*handler)(std::move(connection));  // may destroy this object
  }

  void drop(int fd, const std::string& reason) {
    refused(pending_.at(fd).name, reason);
    forget(fd);
  }

  void refused(const std::string& name, const std::string& reason) {
    last_refusal_ = fmt::format("{} refused {}: {}", address_.to_string(), name, reason);
    strangers_.warn(last_refusal_);
  }

  void forget(int fd) {
    loop_.unwatch(fd);
    loop_.cancel(pending_.at(fd).timeout);
    pending_.erase(fd);
    listen_if_room();
  }

  Loop& loop_;
  Fd listener_;
  Fd reserve_ = open_reserve();
  const Address address_;
  const Options options_;
  // Shared, so that a handler which destroys its acceptor survives until it returns.
  const std::shared_ptr<const Handler> handler_;
  const SocketFile file_;
  QuietLog strangers_;
  std::string last_refusal_;
  bool paused_ = false;
  Loop::TimerId resume_timer_ = 0;
  std::unordered_map<int, Pending> pending_;
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
