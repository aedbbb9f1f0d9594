// One P2P engine, and a peer whose link the test controls byte by byte.
#include <unistd.h>

#include <atomic>
#include <future>

#include "group/ranks.h"
#include "muster/group/p2p/p2p_engine.h"
#include "muster/io/socket.h"
#include "muster/transport/shm/shm_link.h"

namespace muster {
namespace {

using Floats = std::vector<float>;

constexpr Rank kSelf = 0, kPeer = 1;

Deadline test_deadline() { return Deadline::after(std::chrono::seconds(60)); }

LinkIdentity identity(Rank rank) {
  return {rank, 2, "alone", 0, Credentials{to_bytes("a secret of the tests"), nullptr}};
}

class P2pAlone : public testing::TestWithParam<Transport> {
 protected:
  void SetUp() override {
    static std::atomic<int> count = 0;
    const std::string name = "muster-p2p-test-" + std::to_string(getpid()) + "-" + std::to_string(count++);
    const Address address = Address::unix_abstract(name), silent_address = Address::unix_abstract(name + "-silent");
    ASSERT_TRUE(p2p_->listen(address, GetParam()));
    silent_listener_ = std::move(*listen_on(silent_address));
    std::vector<LinkTable::Endpoint> endpoints(2);
    endpoints[kSelf] = {"rank 0 (host here, pid 0)", {}, address.to_string(), GetParam()};
    endpoints[kPeer] = {"rank 1 (host here, pid 0)", {}, silent_address.to_string(), GetParam()};
    p2p_->begin(endpoints);
    address_ = address.to_string();
  }
  void TearDown() override { p2p_->close(); }

  /// Connects the peer. A thread, or the P2P engine's own thread, must drive the engine.
  void link_up() {
    const auto connect = GetParam() == Transport::kShm ? connect_shm_link : connect_link;
    const auto dial = connect(*loop_, *Address::parse(address_), identity(kPeer), kSelf, test_deadline(),
                              [this](Result<std::unique_ptr<Link>> link) {
                                ASSERT_TRUE(link) << link.error().to_string();
                                link_ = std::move(*link);
                              });
    ASSERT_TRUE(loop_->run_until([this] { return link_ != nullptr; }, test_deadline()));
  }
  /// Sends the header of a message of `bytes` bytes, and as much of its payload as `data` contains.
  void send_message(uint32_t tag, size_t bytes, const Floats& data) {
    const auto header = encode({.kind = MessageKind::kEager, .dtype = Dtype::kFloat32, .tag = tag, .bytes = bytes});
    const ConstSegment parts[] = {{header.data(), header.size()}, {data.data(), data.size() * sizeof(float)}};
    bool sent = false;
    link_->send(parts, [&](const Result<>& result) { sent = result.has_value(); });
    ASSERT_TRUE(loop_->run_until([&] { return sent; }, test_deadline()));
  }
  Work receive(Floats& into, Rank from, uint32_t tag, Duration timeout = std::chrono::seconds(60)) {
    return p2p_->receive({into.data(), into.size(), Dtype::kFloat32}, from, tag, {.timeout = timeout, .async = true});
  }

  const std::shared_ptr<P2pEngine> p2p_ = *P2pEngine::create(identity(kSelf), 1);
  const std::unique_ptr<Loop> loop_ = *Loop::create();
  std::unique_ptr<Link> link_;
  Fd silent_listener_;  ///< the peer's listener; it accepts no connection, so a probe learns nothing
  std::string address_;
};

TEST_P(P2pAlone, NamesTheSenderOfAPartialMessage) {
  const Floats whole(1), half(10);
  Floats word(1), in(100);
  const Work first = receive(word, kPeer, 1);
  link_up();
  send_message(1, whole.size() * sizeof(float), whole);
  ASSERT_TRUE(first.wait());
  send_message(2, in.size() * sizeof(float), half);
  Error error;
  do {  // until the header has arrived
    error = receive(in, kAnyRank, 2, 20ms).wait().error();
    ASSERT_EQ(error.code, ErrorCode::kTimeout) << error.to_string();
  } while (error.message.starts_with("timed out waiting for a message"));
  EXPECT_EQ(error.rank, kPeer) << error.to_string();
  EXPECT_EQ(error.message, "rank 1 (host here, pid 0) did not send the whole message in time (tag 2)");
}

/// A receive from an invalid rank is refused, but it may find the message of another receive first. The callback of the
/// other receive must still run.
TEST_P(P2pAlone, RunsEveryCallbackAfterARefusedReceive) {
  const Floats word(1);
  Floats first(1), second(1), none;
  std::promise<void> called_back, release;
  bool called = false;
  const Work busy = receive(first, kPeer, 1), found = receive(second, kPeer, 2);
  busy.on_done([&](const Result<>&) {
    called_back.set_value();
    release.get_future().wait();
  });
  found.on_done([&](const Result<>&) { called = true; });
  link_up();
  send_message(1, sizeof(float), word);
  called_back.get_future().wait();  // so the P2P engine's thread has no work
  send_message(2, sizeof(float), word);
  EXPECT_FALSE(receive(none, 7, 0).wait());
  EXPECT_EQ(called, found.done());
  release.set_value();
  EXPECT_TRUE(found.wait());
  p2p_->close();  // all callbacks have returned
  EXPECT_TRUE(called);
}

/// The error of a receive whose sender has dialed one of the two connections of its link, and then closes it.
Error error_of_partial_link(const Error& why) {
  const auto silent_listener = listen_on(*Address::parse("127.0.0.1:0"));  // accepts nothing, so a probe fails
  const auto p2p = *P2pEngine::create(identity(kSelf), 2);
  const std::string address = *p2p->listen(*Address::parse("127.0.0.1:0"), Transport::kTcp);
  std::vector<LinkTable::Endpoint> endpoints(2);
  endpoints[kSelf] = {"rank 0", {}, address, Transport::kTcp};
  endpoints[kPeer] = {"rank 1", {}, local_address(silent_listener->get())->to_string(), Transport::kTcp};
  p2p->begin(endpoints);
  Floats word(1);
  const Work receive =
      p2p->receive({word.data(), 1, Dtype::kFloat32}, kPeer, 1, {.timeout = std::chrono::seconds(60), .async = true});
  const auto loop = *Loop::create();
  LinkIdentity peer = identity(kPeer);
  peer.subflow = {1, 2};
  std::unique_ptr<Link> link;
  const auto dial = connect_link(*loop, *Address::parse(address), peer, kSelf, test_deadline(),
                                 [&](Result<std::unique_ptr<Link>> made) { link = std::move(made).value(); });
  EXPECT_TRUE(loop->run_until([&] { return link != nullptr; }, test_deadline()));
  link->close(why);
  const auto result = receive.wait();
  p2p->close();
  return result ? Error{} : result.error();
}

TEST(P2pHalfLinked, NamesTheDeadPeer) {
  const Error why{ErrorCode::kPeerLost, "rank 1 is dying", kPeer, {}};
  EXPECT_EQ(error_of_partial_link(why).message, why.message);
}

TEST(P2pHalfLinked, ReportsThatAPeerHasLeft) {
  const Error why{ErrorCode::kLeft, "rank 1 has left the group", kPeer, {}};
  EXPECT_EQ(error_of_partial_link(why).message, why.message);
}

INSTANTIATE_TEST_SUITE_P(Kinds, P2pAlone, testing::Values(Transport::kUnix, Transport::kShm),
                         [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace muster
