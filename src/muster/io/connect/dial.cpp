#include <fmt/format.h>
#include <sys/epoll.h>

#include <algorithm>
#include <optional>

#include "muster/base/check.h"
#include "muster/base/random.h"
#include "muster/io/connect/negotiation.h"
#include "muster/io/socket.h"

namespace muster {
namespace {

constexpr Duration kFirstPause = 5ms;
constexpr Duration kMaxPause = 500ms;

uint64_t fresh_seed() {
  uint64_t seed;
  fill_secure_random({reinterpret_cast<uint8_t*>(&seed), sizeof seed});
  return seed;
}

/// Connects and negotiates. If an attempt fails for a reason that may pass, tries again after a pause, until the
/// deadline.
class Dialer final : public Dial {
 public:
  Dialer(Loop& loop, const Address& address, DialOptions options, const Deadline& deadline, ConnectionHandler handler)
      : loop_(loop),
        address_(address),
        options_(std::move(options)),
        limit_(deadline.left()),
        handler_(std::move(handler)),
        random_(fresh_seed()) {
    give_up_ = loop_.after(limit_, [this] { time_out(); });
    next_ = loop_.after(Duration::zero(), [this] { attempt(); });
  }

  ~Dialer() override { stop(); }

 private:
  void attempt() {
    auto socket = start_connect(address_);
    if (!socket) return failed(std::move(socket).error());
    socket_ = std::move(*socket);
    const auto watched = loop_.watch(socket_.get(), EPOLLOUT, [this](uint32_t) { on_connected(); });
    if (!watched) return finish(tl::unexpected(watched.error()));
  }

  void on_connected() {
    if (auto connected = finish_connect(socket_.get(), address_); !connected) return failed(connected.error());
    loop_.unwatch(socket_.get());
    auto begun = Negotiation::begin(std::move(socket_), Handshake::Side::kClient, options_.credentials, options_.hello);
    if (!begun) return finish(tl::unexpected(begun.error()));
    negotiation_ = std::move(*begun);
    last_problem_ = "it accepted the connection but did not finish the handshake";
    const auto watched = loop_.watch(negotiation_->fd(), EPOLLIN, [this](uint32_t) { negotiate(); });
    if (!watched) return finish(tl::unexpected(watched.error()));
    negotiate();
  }

  void negotiate() {
    const auto done = negotiation_->advance();
    if (!done) return failed(done.error());
    if (*done) {
      loop_.unwatch(negotiation_->fd());
      Connection connection = std::move(*negotiation_).finish(address_);
      negotiation_.reset();
      return finish(std::move(connection));
    }
    if (auto changed = loop_.modify(negotiation_->fd(), negotiation_->interest()); !changed) failed(changed.error());
  }

  void failed(Error error) {
    disconnect();
    if (!may_pass(error.code)) {
      error.message = fmt::format("cannot connect to {}: {}", address_.to_string(), without_prefix(error.message));
      return finish(tl::unexpected(std::move(error)));
    }
    last_problem_ = without_prefix(error.message);
    const auto pause = std::chrono::duration_cast<Duration>(pause_ * (0.5 + random_.uniform() / 2));
    pause_ = std::min(pause_ * 2, kMaxPause);
    next_ = loop_.after(pause, [this] { attempt(); });
  }

  /// True if another attempt may succeed. A full queue or descriptor table empties with time, so such an attempt is
  /// always repeated. With `retry`, the server may also not have started yet.
  bool may_pass(ErrorCode code) const {
    if (code == ErrorCode::kResourceExhausted) return true;
    return options_.retry &&
           (code == ErrorCode::kUnavailable || code == ErrorCode::kPeerLost || code == ErrorCode::kTimeout);
  }

  std::string without_prefix(const std::string& message) const {
    const std::string prefix = fmt::format("cannot connect to {}: ", address_.to_string());
    return message.starts_with(prefix) ? message.substr(prefix.size()) : message;
  }

  void time_out() {
    finish(fail(ErrorCode::kTimeout, fmt::format("nothing answered at {} within {} s: {}", address_.to_string(),
                                                 seconds(limit_), last_problem_)));
  }

  void disconnect() {
    if (socket_) loop_.unwatch(socket_.get());
    if (negotiation_) loop_.unwatch(negotiation_->fd());
    socket_.reset();
    negotiation_.reset();
  }

  void stop() {
    disconnect();
    loop_.cancel(give_up_);
    loop_.cancel(next_);
  }

  // The handler may destroy this object, so no code may follow its call.
  void finish(Result<Connection> result) {
    stop();
    const auto handler = std::move(handler_);
    handler(std::move(result));
  }

  Loop& loop_;
  const Address address_;
  const DialOptions options_;
  const Duration limit_;
  ConnectionHandler handler_;
  Random random_;
  Duration pause_ = kFirstPause;
  std::string last_problem_ = "no answer to the connection request";
  Loop::TimerId give_up_ = 0, next_ = 0;
  Fd socket_;
  std::optional<Negotiation> negotiation_;
};

}  // namespace

std::unique_ptr<Dial> dial(Loop& loop, const Address& address, DialOptions options, const Deadline& deadline,
                           ConnectionHandler handler) {
  MUSTER_CHECK(handler != nullptr, "a dial needs a handler");
  return std::make_unique<Dialer>(loop, address, std::move(options), deadline, std::move(handler));
}

}  // namespace muster
