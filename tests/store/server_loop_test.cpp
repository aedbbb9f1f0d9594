// A revocation may overtake the grant of a lease. A fake backend decides when leases are granted and revoked. The test
// drives the loop, and plays the proxy at the other end of a socket.
#include "muster/store/server/server_loop.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <memory>
#include <optional>

#include "muster/store/protocol/messages.h"
#include "store/expect.h"
#include "store/test_server.h"

namespace muster {
namespace {

struct FakeBackend : Backend {
  void submit(Request, ClientId client) override { proxy = client; }
  void drop(ClientId) override {}
  uint64_t revoke(ClientId) override {
    revoked = true;
    return revocations;
  }
  uint64_t grants_ended() const override { return revocations_above; }
  void serves_proxies(size_t) override {}
  Duration lease_left() const override { return Duration::max(); }

  ClientId proxy = 0;              // the client that sent a request
  bool revoked = false;            // the loop has called revoke()
  uint64_t revocations = 0;        // the result of revoke()
  uint64_t revocations_above = 0;  // by the server above
};

class ServerLoopLeases : public testing::Test {
 protected:
  ServerLoopLeases() {
    auto backend = std::make_unique<FakeBackend>();
    backend_ = backend.get();
    loop_.set_backend(std::move(backend));
    connect(/*resumes=*/false);
    ask();
  }

  static StoreServerOptions with_short_leases() {
    StoreServerOptions options;
    options.lease_time = 1ms;
    return options;
  }

  // Opens a link of the proxy's session. Closes the link before, if there was one.
  void connect(bool resumes) {
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    socket_.reset(ends[0]);
    parser_ = FrameParser(kMaxSessionFrameBytes);
    ServerLoop::AcceptedConnection accepted;
    accepted.connection.stream = plain_stream(Fd(ends[1]));
    accepted.connection.peer = Address::unix_abstract("proxy");
    accepted.session = SessionId{};
    loop_.admit(std::move(accepted));
    write(encode(SessionOpen{0, resumes}));
    EXPECT_TRUE(decode_session_opened(next_frame()).value().known);
  }

  // Sends a request, so that the backend learns the proxy's number.
  void ask() {
    ReliableSession session;
    EXPECT_OK(session.connect(0));
    session.put(*encode_request({StoreOperation::kGet, 1, {"k"}}));
    Bytes frame;
    session.write(frame, {});
    write(frame);
    EXPECT_OK(loop_.loop().run_until([&] { return backend_->proxy != 0; }, test_deadline()));
  }

  // Delivers the grant of a lease to the loop. `granted` is the number of revocations before it.
  void deliver_lease(uint64_t granted) {
    Reply reply{backend_->proxy, 1};
    reply.leased = true;
    reply.granted = granted;
    loop_.deliverer()(Replies{reply});
  }

  // True if the proxy may use the lease of its next reply. The proxy acknowledges no frame.
  bool gets_lease() {
    const Frame frame = next_frame();
    bool leased = false;
    EXPECT_OK(for_each_message(ByteView(frame.payload).subspan(ReliableSession::Received::kHeaderBytes),
                               [&](const FrameHeader& header, ByteView payload) -> Result<> {
                                 leased = decode_reply(header, payload).value().leased;
                                 return {};
                               }));
    return leased;
  }

  void write(ByteView bytes) {
    EXPECT_EQ(::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), std::ssize(bytes));
  }

  Frame next_frame() {
    std::optional<Frame> frame;
    const auto arrived = [&] {
      uint8_t bytes[4096];
      const ssize_t count = ::recv(socket_.get(), bytes, sizeof bytes, 0);
      if (count > 0) parser_.feed({bytes, static_cast<size_t>(count)});
      frame = parser_.next().value();
      return frame.has_value();
    };
    EXPECT_OK(loop_.loop().run_until(arrived, test_deadline()));
    return frame.value();
  }

  const StoreServerOptions options_ = with_short_leases();
  FakeBackend* backend_ = nullptr;  // the loop owns it
  ServerLoop loop_{options_, 0, 1, {}, Loop::create().value()};
  Fd socket_;
  FrameParser parser_{kMaxSessionFrameBytes};
};

TEST_F(ServerLoopLeases, GrantedAfterARevocationAboveArePassedOn) {
  backend_->revocations_above = 1;
  deliver_lease(/*granted=*/1);
  EXPECT_TRUE(gets_lease());
  deliver_lease(/*granted=*/0);
  EXPECT_FALSE(gets_lease());
}

TEST_F(ServerLoopLeases, RevokedAboveAreRemovedFromFramesSentAgain) {
  deliver_lease(/*granted=*/0);
  EXPECT_TRUE(gets_lease());
  backend_->revocations_above = 1;
  connect(/*resumes=*/true);
  EXPECT_FALSE(gets_lease());
}

TEST_F(ServerLoopLeases, GrantedBeforeTheSilenceOfTheProxyAreRemoved) {
  backend_->revocations = 1;
  backend_->revoked = false;
  EXPECT_OK(loop_.loop().run_until([&] { return backend_->revoked; }, test_deadline()));
  deliver_lease(/*granted=*/0);
  EXPECT_FALSE(gets_lease());
  deliver_lease(/*granted=*/1);
  EXPECT_TRUE(gets_lease());
}

}  // namespace
}  // namespace muster
