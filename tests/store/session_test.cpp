#include "muster/store/session.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "muster/store/proxy/proxy_link.h"
#include "muster/store/server/server_session.h"
#include "store/expect.h"
#include "store/manual_clock.h"

namespace muster {
namespace {

Bytes message(int number) { return encode_frame(1, to_bytes(std::to_string(number))); }

// The two ends of a session, and the bytes on their way between them.
struct Pair {
  struct Side {
    ReliableSession end{{64, 1 << 20}};  // a few messages per frame
    FrameParser parser{kMaxSessionFrameBytes};
    Bytes incoming;
    std::vector<std::string> got;
  };
  Side a, b;

  void connect() {
    for (Side* side : {&a, &b}) {
      side->end.disconnect();
      side->incoming.clear();
      side->parser = FrameParser(kMaxSessionFrameBytes);
    }
    const uint64_t a_has = a.end.received(), b_has = b.end.received();
    EXPECT_OK(a.end.connect(b_has));
    EXPECT_OK(b.end.connect(a_has));
  }
  void write() {
    a.end.write(b.incoming, {});
    b.end.write(a.incoming, {});
  }
  static void deliver(Side& side, size_t count) {
    count = std::min(count, side.incoming.size());
    side.parser.feed(ByteView(side.incoming).first(count));
    side.incoming.erase(side.incoming.begin(), side.incoming.begin() + static_cast<ptrdiff_t>(count));
    while (true) {
      auto frame = side.parser.next();
      ASSERT_TRUE(frame.has_value());
      if (!*frame) return;
      const auto received = side.end.receive(std::move(**frame));
      ASSERT_TRUE(received.has_value()) << received.error().to_string();
      EXPECT_OK(for_each_message(received->messages(), [&](const FrameHeader&, ByteView payload) -> Result<> {
        side.got.push_back(to_string(payload));
        return {};
      }));
    }
  }
};

std::vector<std::string> numbers(int count) {
  std::vector<std::string> result;
  for (int i = 0; i < count; ++i) result.push_back(std::to_string(i));
  return result;
}

TEST(ReliableSession, DeliversEveryMessageOnceWhereverTheLinkIsCut) {
  for (size_t cut = 0; cut < 600; ++cut) {
    Pair pair;
    pair.connect();
    int sent = 0;
    for (int link = 0; link < 3; ++link) {
      for (int i = 0; i < 10; ++i, ++sent) {
        pair.a.end.put(message(sent));
        pair.b.end.put(message(sent));
        if (i % 3 == 0) pair.write();
      }
      pair.write();
      Pair::deliver(pair.b, cut);  // the bytes after the cut are lost with the link
      Pair::deliver(pair.a, cut * 7 / 3 % 600);
      pair.connect();
      pair.write();
    }
    Pair::deliver(pair.a, SIZE_MAX);
    Pair::deliver(pair.b, SIZE_MAX);
    ASSERT_EQ(pair.a.got, numbers(sent)) << "cut after " << cut;
    ASSERT_EQ(pair.b.got, numbers(sent)) << "cut after " << cut;
  }
}

TEST(ReliableSession, KeepsMessagesWithoutALink) {
  Pair pair;
  for (int i = 0; i < 5; ++i) pair.a.end.put(message(i));
  pair.write();
  EXPECT_TRUE(pair.b.incoming.empty());
  pair.connect();
  pair.write();
  Pair::deliver(pair.b, SIZE_MAX);
  EXPECT_EQ(pair.b.got, numbers(5));
}

TEST(ReliableSession, ForgetsAcknowledgedMessages) {
  Pair pair;
  pair.connect();
  pair.a.end.put(message(0));
  pair.write();
  EXPECT_GT(pair.a.end.unacknowledged(), 0U);
  Pair::deliver(pair.b, SIZE_MAX);
  pair.b.end.write_keepalive(pair.a.incoming, {});
  Pair::deliver(pair.a, SIZE_MAX);
  EXPECT_EQ(pair.a.end.unacknowledged(), 0U);
}

TEST(ReliableSession, WantsAnAcknowledgementAfterManyBytes) {
  ReliableSession end({64, 100}), other;
  EXPECT_OK(end.connect(0));
  EXPECT_OK(other.connect(0));
  other.put(encode_frame(1, Bytes(200)));
  Bytes bytes;
  other.write(bytes, {});
  FrameParser parser(kMaxSessionFrameBytes);
  parser.feed(bytes);
  EXPECT_TRUE(end.receive(**parser.next()).has_value());
  EXPECT_TRUE(end.wants_ack());
  end.write_keepalive(bytes, {});
  EXPECT_FALSE(end.wants_ack());
}

TEST(ReliableSession, RefusesImpossibleSequenceNumbers) {
  ReliableSession end;
  expect_error(end.connect(1), ErrorCode::kProtocol, "says that it has 1 frames");
  EXPECT_OK(end.connect(0));
  const auto data = [](uint64_t sequence, uint64_t received) {
    Writer out;
    out.put(sequence).put(received).put(int64_t{0}).put(int64_t{0}).put(int64_t{0});
    return Frame{{40, 194, 0}, out.take()};
  };
  expect_error(end.receive(data(2, 0)), ErrorCode::kProtocol, "follows");
  expect_error(end.receive(data(1, 1)), ErrorCode::kProtocol, "were sent");
  expect_error(end.receive(Frame{{0, 77, 0}, {}}), ErrorCode::kProtocol, "kind 77");
  EXPECT_TRUE(end.receive(data(1, 0)).has_value());
  EXPECT_EQ(end.received(), 1U);
}

TEST(ProxyLink, SendsKeepalivesAsOftenAsTheServerWants) {
  EXPECT_EQ(interval_growth(100), 1);
  EXPECT_EQ(interval_growth(4096), 4);
  EXPECT_EQ(interval_growth(100'000), kMaxIntervalGrowth);
  for (const int64_t growth : {1, 8}) {
    const size_t proxies = static_cast<size_t>(growth) * kProxiesPerInterval;
    ManualClock clock;
    const TimePoint begin = clock.now();
    ProxyLink link({{true}, "above"});
    ServerSession session(clock);
    session.link_up();
    EXPECT_OK(session.receive(link.begin(begin)));
    link.submit({StoreOperation::kGet, 1, {"never"}}, 1, begin);
    Bytes down, up;
    session.write(down, proxies);
    EXPECT_OK(link.receive(down, begin));
    link.write(up, begin);
    EXPECT_OK(session.receive(up));
    session.reply({1, 99});
    down.clear();
    session.write(down, proxies);
    EXPECT_OK(link.receive(down, begin));
    EXPECT_EQ(link.next_wake(), begin + kKeepaliveInterval * growth);
    EXPECT_EQ(link.lease_left(begin), kLeaseTime * growth);
    EXPECT_EQ(link.silent(begin + 20s), growth == 1);
  }
}

// A root, the root's end of a proxy's session, and the proxy, with a clock that the test moves.
struct LeaseFixture {
  static constexpr ClientId kProxy = 99, kOtherClient = 98;

  LeaseFixture() {
    session.link_up();
    EXPECT_OK(session.receive(link.begin(clock.now())));
    exchange();
    // The first frame of the proxy starts its leases.
    ask(StoreOperation::kAdd, "n");
    pass(1s);
  }
  void ask(StoreOperation operation, const Key& key) {
    link.submit({operation, ++last_id, {key}, {}, 1}, 1, clock.now());
  }
  /// Carries bytes in both directions until neither end has bytes to send.
  void exchange() {
    for (bool more = true; more;) {
      Bytes up, down;
      link.write(up, clock.now());
      auto input = session.receive(up);
      ASSERT_TRUE(input.has_value()) << input.error().to_string();
      for (Request& request : input->requests) {
        for (const Reply& reply : root.apply(std::move(request), kProxy)) session.reply(reply);
      }
      session.write(down);
      EXPECT_OK(link.receive(down, clock.now()));
      for (const Reply& reply : link.take_replies()) {
        if (!reply.values.empty()) values.push_back(to_string(reply.values[0]));
      }
      more = !up.empty() || !down.empty();
    }
  }
  void pass(Duration time) {
    for (const TimePoint end = clock.now() + time; clock.now() < end; exchange()) clock.pass(100ms);
  }
  /// Sets the key for another client. Returns the replies that the set releases for the proxy.
  Replies set(const char* value) {
    Replies replies = root.apply({StoreOperation::kSet, ++last_id, {"k"}, {to_bytes(value)}}, kOtherClient);
    EXPECT_TRUE(std::ranges::any_of(replies, [](const Reply& reply) { return reply.client == kOtherClient; }))
        << "a client holds a lease";
    std::erase_if(replies, [](const Reply& reply) { return reply.client == kOtherClient; });
    return replies;
  }
  void revoke() {
    Replies freed;
    session.end_grants(root.revoke(kProxy, freed));
  }

  ManualClock clock;
  StoreState root;
  ServerSession session{clock};
  ProxyLink link{{{true}, "above"}};
  RequestId last_id = 0;
  std::vector<std::string> values;
};

// The grant comes from another thread of the server. It arrives after the proxy's leases were revoked and the proxy
// sent a new frame.
TEST(ProxyLink, DropsALeaseRevokedWhileItsGrantWasOnItsWay) {
  LeaseFixture world;
  world.ask(StoreOperation::kGet, "k");
  world.exchange();
  const Replies granted = world.set("old");
  ASSERT_EQ(granted.size(), 1U);
  EXPECT_TRUE(granted[0].leased);
  world.clock.pass(3 * kLeaseTime);
  world.revoke();
  world.pass(5s);
  EXPECT_GT(world.link.lease_left(world.clock.now()), Duration{0});
  world.session.reply(granted[0]);
  world.pass(100ms);
  EXPECT_EQ(world.values, std::vector<std::string>{"old"}) << "it is the answer, and no more";
  world.set("new");
  world.ask(StoreOperation::kGet, "k");
  world.pass(100ms);
  EXPECT_EQ(world.values, (std::vector<std::string>{"old", "new"}));
}

TEST(ProxyLink, DropsALeaseRevokedWhileItsGrantWasQueued) {
  LeaseFixture world;
  world.ask(StoreOperation::kGet, "k");
  world.exchange();
  for (const Reply& reply : world.set("old")) world.session.reply(reply);
  world.clock.pass(3 * kLeaseTime);
  world.revoke();
  Bytes keepalive;
  // The server receives the keepalive before it writes anything, so new leases may be granted.
  world.link.write(keepalive, world.clock.now());
  EXPECT_OK(world.session.receive(keepalive));
  world.pass(100ms);
  EXPECT_GT(world.link.lease_left(world.clock.now()), Duration{0});
  world.set("new");
  world.ask(StoreOperation::kGet, "k");
  world.pass(100ms);
  EXPECT_EQ(world.values, (std::vector<std::string>{"old", "new"}));
}

TEST(ProxyLink, UsesALeaseGrantedAfterTheLastRevocation) {
  LeaseFixture world;
  world.clock.pass(3 * kLeaseTime);
  world.revoke();
  world.pass(1s);
  EXPECT_TRUE(world.set("v").empty());
  for (int i = 0; i < 2; ++i) {
    world.ask(StoreOperation::kGet, "k");
    if (i == 0) world.pass(100ms);
  }
  const Replies answers = world.link.take_replies();
  ASSERT_EQ(answers.size(), 1U) << "the second read is not answered by the proxy";
  EXPECT_EQ(answers[0].values, std::vector<Bytes>{to_bytes("v")});
}

TEST(ProxyLink, OfManyProxiesSendsFewerFrames) {
  ManualClock clock;
  const TimePoint begin = clock.now();
  ProxyLink link({{true}, "above"});
  ServerSession session(clock);
  session.link_up();
  Bytes down, up;
  const auto go_up = [&](TimePoint now) {
    up.clear();
    link.write(up, now);
    EXPECT_OK(session.receive(up));
    return !up.empty();
  };
  EXPECT_OK(session.receive(link.begin(begin)));
  session.write(down);
  EXPECT_OK(link.receive(down, begin));
  EXPECT_EQ(session.min_interval(), 0ms);
  link.serves_proxies(100);
  link.submit({StoreOperation::kGet, 1, {"first"}}, 1, begin);
  EXPECT_TRUE(go_up(begin)) << "nothing was sent before";
  EXPECT_EQ(session.min_interval(), 40ms);
  link.submit({StoreOperation::kGet, 1, {"second"}}, 2, begin + 1ms);
  EXPECT_FALSE(go_up(begin + 1ms));
  EXPECT_EQ(link.next_wake(), begin + 40ms);
  link.serves_proxies(1000);
  EXPECT_FALSE(go_up(begin + 49ms));
  EXPECT_TRUE(go_up(begin + 50ms));
  EXPECT_EQ(session.min_interval(), kMaxMinInterval);
}

TEST(SessionFrames, SurviveTheWireAndRefuseOthers) {
  const auto frame_of = [](const Bytes& bytes) {
    FrameParser parser(kMaxSessionFrameBytes);
    parser.feed(bytes);
    return **parser.next();
  };
  const auto open = decode_session_open(frame_of(encode(SessionOpen{7, true})));
  ASSERT_TRUE(open.has_value());
  EXPECT_EQ(open->received, 7U);
  EXPECT_TRUE(open->resumes);
  const auto opened = decode_session_opened(frame_of(encode(SessionOpened{9, false})));
  ASSERT_TRUE(opened.has_value());
  EXPECT_EQ(opened->received, 9U);
  EXPECT_FALSE(opened->known);
  expect_error(decode_session_open(frame_of(encode(SessionOpened{}))), ErrorCode::kProtocol);
  EXPECT_TRUE(is_session_close(frame_of(encode_session_close())));
  const SessionId id = fresh_session_id();
  EXPECT_EQ(session_of_hello(proxy_hello(id)), id);
  EXPECT_FALSE(session_of_hello(as_bytes("muster store")).has_value());
}

TEST(SessionFrames, RefuseATruncatedMessage) {
  const Bytes whole = message(1);
  const auto count = [](ByteView bytes) {
    int messages = 0;
    const auto read = for_each_message(bytes, [&](const FrameHeader&, ByteView) -> Result<> {
      ++messages;
      return {};
    });
    return read ? messages : -1;
  };
  EXPECT_EQ(count(whole), 1);
  for (size_t length = 1; length < whole.size(); ++length) EXPECT_EQ(count(ByteView(whole).first(length)), -1);
}

}  // namespace
}  // namespace muster
