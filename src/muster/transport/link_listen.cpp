#include "muster/transport/link_listen.h"

#include <fmt/format.h>

#include <map>

#include "muster/base/check.h"
#include "muster/base/log.h"

namespace muster {
namespace {

constexpr Duration kNegotiationTimeout = 10s;
constexpr size_t kMaxNegotiations = 1024;

class SocketListener final : public Listener {
 public:
  SocketListener(Loop& loop, LinkHello hello, LinkFactory factory, LinkHandler handler)
      : loop_(loop), hello_(std::move(hello)), factory_(std::move(factory)), handler_(std::move(handler)) {}

  Result<> start(const Address& address, Credentials credentials) {
    Acceptor::Options options{.credentials = std::move(credentials), .hello = encode(hello_)};
    MUSTER_ASSIGN(acceptor_, Acceptor::create(loop_, address, std::move(options),
                                              [this](Connection connection) { negotiate(std::move(connection)); }));
    return {};
  }
  std::string address() const override { return acceptor_->address().to_string(); }
  std::string last_refusal() const override {
    return last_refusal_.empty() ? acceptor_->last_refusal() : last_refusal_;
  }

 private:
  void negotiate(Connection connection) {
    if (negotiations_.size() >= kMaxNegotiations) {
      return log(LogLevel::kWarning, "refused a link: too many links are being negotiated");
    }
    const uint64_t id = next_++;
    negotiations_[id] = std::make_unique<LinkNegotiation>(
        loop_, std::move(connection), hello_, kNoRank, Deadline::after(kNegotiationTimeout, loop_.clock()),
        [this, id](Result<NegotiatedLink> negotiated) { finish(id, std::move(negotiated)); });
  }

  void finish(uint64_t id, Result<NegotiatedLink> negotiated) {
    negotiations_.erase(id);
    Result<std::unique_ptr<Link>> link = std::move(negotiated).and_then(factory_);
    if (!link) {
      last_refusal_ = fmt::format("rank {} of group \"{}\" refused a link: {}", hello_.rank, hello_.group,
                                  link.error().to_string());
      return log(LogLevel::kWarning, last_refusal_);
    }
    const LinkHandler handler = handler_;  // a copy, because the handler may destroy this listener
    handler(std::move(*link));
  }

  Loop& loop_;
  const LinkHello hello_;
  const LinkFactory factory_;
  const LinkHandler handler_;
  std::map<uint64_t, std::unique_ptr<LinkNegotiation>> negotiations_;
  uint64_t next_ = 0;
  std::string last_refusal_;  // of a peer that passed the handshake
  std::unique_ptr<Acceptor> acceptor_;
};

/// Connects to one peer and makes a link. Reports an invalid identity in the next turn of the loop, so that no handler
/// is called before its Dial is returned.
class LinkDial final : public Dial {
 public:
  LinkDial(Loop& loop, LinkFactory factory, Rank expected, const Deadline& deadline, ConnectHandler handler)
      : loop_(loop),
        factory_(std::move(factory)),
        expected_(expected),
        deadline_(deadline),
        handler_(std::move(handler)) {}
  ~LinkDial() override { loop_.cancel(refusal_); }

  void refuse(Error why) {
    refusal_ = loop_.after(Duration::zero(), [this, why = std::move(why)] { finish(tl::unexpected(why)); });
  }

  void start(const Address& address, LinkIdentity self, LinkHello hello) {
    DialOptions options{std::move(self.credentials), encode(hello), self.retry_refused};
    hello_ = std::move(hello);
    dial_ = dial(loop_, address, std::move(options), deadline_,
                 [this](Result<Connection> connection) { open(std::move(connection)); });
  }

 private:
  void open(Result<Connection> connection) {
    if (!connection) {
      Error error = std::move(connection).error();
      error.rank = expected_;
      error.message = fmt::format("no link to rank {}: {}", expected_, error.message);
      return finish(tl::unexpected(std::move(error)));
    }
    negotiation_.emplace(loop_, std::move(*connection), hello_, expected_, deadline_,
                         [this](Result<NegotiatedLink> agreed) { finish(std::move(agreed).and_then(factory_)); });
  }

  // The handler may destroy this object, so its call comes last.
  void finish(Result<std::unique_ptr<Link>> result) {
    const ConnectHandler handler = std::move(handler_);
    handler(std::move(result));
  }

  Loop& loop_;
  const LinkFactory factory_;
  const Rank expected_;
  const Deadline deadline_;
  ConnectHandler handler_;
  LinkHello hello_;
  Loop::TimerId refusal_ = 0;
  std::unique_ptr<Dial> dial_;
  std::optional<LinkNegotiation> negotiation_;
};

}  // namespace

Result<std::unique_ptr<Listener>> listen_for_links(Loop& loop, const Address& address, LinkIdentity self,
                                                   LinkHello::Wire wire, LinkFactory factory, LinkHandler handler) {
  MUSTER_CHECK(handler != nullptr, "a listener needs a handler");
  MUSTER_ASSIGN(LinkHello hello, make_hello(self, wire));
  auto listener = std::make_unique<SocketListener>(loop, std::move(hello), std::move(factory), std::move(handler));
  MUSTER_TRY(listener->start(address, std::move(self.credentials)));
  return listener;
}

std::unique_ptr<Dial> dial_link(Loop& loop, const Address& address, LinkIdentity self, LinkHello::Wire wire,
                                Rank expected, const Deadline& deadline, LinkFactory factory, ConnectHandler handler) {
  MUSTER_CHECK(handler != nullptr, "a dial needs a handler");
  auto dial = std::make_unique<LinkDial>(loop, std::move(factory), expected, deadline, std::move(handler));
  if (Result<LinkHello> hello = make_hello(self, wire); hello) {
    dial->start(address, std::move(self), std::move(*hello));
  } else {
    dial->refuse(hello.error());
  }
  return dial;
}

}  // namespace muster
