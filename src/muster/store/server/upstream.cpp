// A proxy's side of its one link to the server above: the sockets, timers and reconnections around a ProxyLink.

#include <fmt/format.h>

#include <cerrno>
#include <optional>

#include "muster/base/log.h"
#include "muster/base/random.h"
#include "muster/store/connect.h"
#include "muster/store/proxy/proxy_link.h"
#include "muster/store/server/backend.h"
#include "muster/store/server/buffered_connection.h"

namespace muster {
namespace {

constexpr Duration kAttemptTimeout = 10s;  // for one attempt to reconnect
constexpr Duration kMinPause = 5ms, kMaxPause = 1s;
// If a server's address refuses connections for this long, the server has ended and its data is lost. More waiting
// would not help.
constexpr Duration kRefusedGrace = 1s;
constexpr size_t kMaxQueue = size_t{1} << 30;  // bytes that wait for the link

Random seeded() {
  uint64_t seed = 0;
  fill_secure_random({reinterpret_cast<uint8_t*>(&seed), sizeof seed});
  return Random(seed);
}

// True if the host answers, but no server listens there.
bool is_refusal(const Error& error) { return error.system_error == ECONNREFUSED; }

/// The backend of a proxy: a ProxyLink with a loop, a socket and timers. Its fields are the state of one reconnection
/// (dial, pause, since when, why) beside the link itself.
class Upstream : public Backend {
 public:
  Upstream(Loop& loop, const StoreServerOptions& options, Deliver deliver)
      : loop_(loop),
        options_(options),
        deliver_(std::move(deliver)),
        link_({{options.tiered}, options.upstream}, options.session ? *options.session : fresh_session_id()) {}

  ~Upstream() override {
    if (connection_) {
      const Bytes close = encode_session_close();
      connection_->out().insert(connection_->out().end(), close.begin(), close.end());
      connection_->flush();
    }
    for (const auto timer : {turn_timer_, wake_timer_, retry_timer_}) {
      if (timer) loop_.cancel(*timer);
    }
  }

  Bytes hello() const { return proxy_hello(link_.session()); }

  Result<> attach(Connection connection) {
    refused_since_.reset();
    pause_ = kMinPause;
    address_ = connection.peer;
    old_connection_ = std::move(connection_);
    connection_ = std::make_unique<BufferedConnection>(
        loop_, std::move(connection.stream), BufferedConnection::Options{kMaxQueue},
        BufferedConnection::Handlers{[this](ByteView bytes) { on_input(bytes); },
                                     [this](const Error& why) { on_lost(why); }});
    const Bytes begin = link_.begin(now());
    connection_->out().insert(connection_->out().end(), begin.begin(), begin.end());
    MUSTER_TRY(connection_->start());
    connection_->flush();
    if (!connection.leftover.empty()) on_input(connection.leftover);
    return {};
  }

  void submit(Request request, ClientId client) override {
    link_.submit(std::move(request), client, now());
    schedule_turn();
  }
  void drop(ClientId client) override {
    link_.drop(client);
    schedule_turn();
  }
  uint64_t revoke(ClientId client) override {
    const uint64_t revocations = link_.revoke(client);
    schedule_turn();
    return revocations;
  }
  uint64_t grants_ended() const override { return link_.grants_ended(); }
  void serves_proxies(size_t count) override { link_.serves_proxies(count); }
  Duration lease_left() const override { return link_.lease_left(now()); }

 private:
  TimePoint now() const { return loop_.clock().now(); }

  // Requests of one turn of the loop go up in one frame.
  void schedule_turn() {
    if (turn_timer_) return;
    turn_timer_ = loop_.after(Duration{0}, [this] {
      turn_timer_.reset();
      take_turn();
    });
  }

  void take_turn() {
    if (link_.lost()) connection_.reset();  // closes the link, so the server above sees the end of the session at once
    if (connection_) {
      link_.write(connection_->out(), now());
      connection_->flush();
    }
    Replies replies = link_.take_replies();
    if (!replies.empty()) deliver_(std::move(replies));
    const auto next = link_.next_wake();
    if (!next || (wake_timer_ && wake_at_ <= *next)) return;
    if (wake_timer_) loop_.cancel(*wake_timer_);
    wake_at_ = *next;
    wake_timer_ = loop_.at(wake_at_, [this] {
      wake_timer_.reset();
      if (link_.silent(now())) on_lost({ErrorCode::kTimeout, "the link was silent for too long"});
      take_turn();
    });
  }

  void on_input(ByteView bytes) {
    if (link_.receive(bytes, now())) return take_turn();
    log(LogLevel::kError, link_.lost()->message);
    connection_->close();
    schedule_turn();  // a handler of the connection is on the stack
  }

  // ---- when the link breaks

  void on_lost(const Error& why) {
    if (link_.lost()) return;
    connection_->close();
    link_.link_lost();
    lost_since_ = now();
    reason_ = why.message;
    log(LogLevel::kInfo,
        fmt::format("the link to the store at {} broke ({}); reconnecting", options_.upstream, reason_));
    attempt();
  }

  // Dials only the address of the last link. The server keeps only the newest link of a session, so if this dialed all
  // addresses of a host name, a later connection could replace the new link.
  void attempt() {
    dial_ = dial(loop_, address_, store_dial_options(address_, options_.credentials, hello()),
                 Deadline::after(kAttemptTimeout, loop_.clock()).or_sooner(lost_since_ + options_.link_grace),
                 [this](Result<Connection> outcome) { on_dialed(std::move(outcome)); });
  }

  void on_dialed(Result<Connection> outcome) {
    if (outcome && to_string(outcome->hello) == kStoreHello) {
      if (const auto attached = attach(std::move(*outcome)); !attached) on_lost(attached.error());
      return;
    }
    if (!outcome) reason_ = outcome.error().message;
    if (!outcome && outcome.error().code == ErrorCode::kAuthentication) return give_up();
    const bool refused = !outcome && is_refusal(outcome.error());
    if (!refused) refused_since_.reset();
    if (refused && !refused_since_) refused_since_ = now();
    const bool ended = refused_since_ && now() - *refused_since_ >= kRefusedGrace;
    if (ended || now() - lost_since_ >= options_.link_grace) return give_up();
    // The pause is random, so that the proxies of one server do not all dial at the same moment.
    const auto pause =
        Duration(static_cast<int64_t>(static_cast<double>(pause_.count()) * (0.5 + random_.uniform() / 2)));
    pause_ = std::min(pause_ * 2, refused_since_ ? kRefusedGrace / 4 : kMaxPause);
    retry_timer_ = loop_.after(pause, [this] {
      retry_timer_.reset();
      attempt();
    });
  }

  void give_up() {
    link_.give_up(reason_);
    log(LogLevel::kError, link_.lost()->message);
    take_turn();
  }

  Loop& loop_;
  const StoreServerOptions options_;
  const Deliver deliver_;
  ProxyLink link_;
  std::unique_ptr<BufferedConnection> connection_, old_connection_;
  std::optional<Loop::TimerId> turn_timer_, wake_timer_, retry_timer_;
  TimePoint wake_at_{};
  Address address_;  // of the last link
  std::unique_ptr<Dial> dial_;
  TimePoint lost_since_{};
  std::optional<TimePoint> refused_since_;
  std::string reason_;
  Duration pause_ = kMinPause;
  Random random_ = seeded();
};

}  // namespace

Result<std::unique_ptr<Backend>> upstream_backend(Loop& loop, const StoreServerOptions& options,
                                                  const Deadline& deadline, Backend::Deliver deliver) {
  auto upstream = std::make_unique<Upstream>(loop, options, std::move(deliver));
  MUSTER_ASSIGN(Connection connection,
                connect_to_store(options.upstream, options.credentials, deadline, upstream->hello()));
  MUSTER_TRY(upstream->attach(std::move(connection)));
  return upstream;
}

}  // namespace muster
