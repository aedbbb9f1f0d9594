#include "muster/store/session.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "muster/store/proxy/proxy_link.h"
#include "muster/store/server/server_session.h"
#include "store/expect.h"

namespace muster {
namespace {

Bytes message(int number) { return encode_frame(1, to_bytes(std::to_string(number))); }

// Both ends of a session, and the bytes between them.
struct Pair {
  struct Side {
    ReliableSession end{{64, 1 << 20}};  // a few messages a frame
    FrameParser parser{kMaxTierFrameBytes};
    Bytes incoming;
    std::vector<std::string> got;
  };
  Side a, b;

  void connect() {
    for (Side* side : {&a, &b}) {
      side->end.disconnect();
      side->incoming.clear();
      side->parser = FrameParser(kMaxTierFrameBytes);
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
      Pair::deliver(pair.b, cut);  // what is behind is lost with the link
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

TEST(ReliableSession, KeepsWhatIsPutWithoutALink) {
  Pair pair;
  for (int i = 0; i < 5; ++i) pair.a.end.put(message(i));
  pair.write();
  EXPECT_TRUE(pair.b.incoming.empty());
  pair.connect();
  pair.write();
  Pair::deliver(pair.b, SIZE_MAX);
  EXPECT_EQ(pair.b.got, numbers(5));
}

TEST(ReliableSession, ForgetsWhatTheOtherEndHas) {
  Pair pair;
  pair.connect();
  pair.a.end.put(message(0));
  pair.write();
  EXPECT_GT(pair.a.end.unacknowledged(), 0U);
  Pair::deliver(pair.b, SIZE_MAX);
  pair.b.end.write_beat(pair.a.incoming, {});
  Pair::deliver(pair.a, SIZE_MAX);
  EXPECT_EQ(pair.a.end.unacknowledged(), 0U);
}

TEST(ReliableSession, AsksForAnAnswerAfterManyBytes) {
  ReliableSession end({64, 100}), other;
  EXPECT_OK(end.connect(0));
  EXPECT_OK(other.connect(0));
  other.put(encode_frame(1, Bytes(200)));
  Bytes bytes;
  other.write(bytes, {});
  FrameParser parser(kMaxTierFrameBytes);
  parser.feed(bytes);
  EXPECT_TRUE(end.receive(**parser.next()).has_value());
  EXPECT_TRUE(end.wants_ack());
  end.write_beat(bytes, {});
  EXPECT_FALSE(end.wants_ack());
}

TEST(ReliableSession, RefusesNumbersThatCannotBe) {
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

TEST(ProxyLink, GivesSignsOfLifeAsOftenAsTheServerWantsThem) {
  constexpr TimePoint kBegin{1'000'000'000};
  EXPECT_EQ(beat_growth(100), 1);
  EXPECT_EQ(beat_growth(4096), 4);
  EXPECT_EQ(beat_growth(100'000), kMaxBeatGrowth);
  for (const int64_t growth : {1, 8}) {
    ProxyLink link({{true}, "above"});
    ServerSession host;
    host.link_up(kBegin);
    EXPECT_OK(host.receive(link.begin(kBegin), kBegin));
    link.submit({StoreOperation::kGet, 1, {"never"}}, 1, kBegin);
    Bytes down, up;
    host.write(down, kLeaseTime * growth, kBeat * growth);
    EXPECT_OK(link.receive(down, kBegin));
    link.write(up, kBegin);
    EXPECT_OK(host.receive(up, kBegin));
    host.reply({1, 99});
    down.clear();
    host.write(down, kLeaseTime * growth, kBeat * growth);
    EXPECT_OK(link.receive(down, kBegin));
    EXPECT_EQ(link.next_wake(), kBegin + kBeat * growth);
    EXPECT_EQ(link.lease_left(kBegin), kLeaseTime * growth);
    EXPECT_EQ(link.silent(kBegin + 20s), growth == 1);
  }
}

// A root, its end of a proxy's session, and the proxy. Time passes at need.
struct LeasedWorld {
  static constexpr ClientId kProxy = 99, kStranger = 98;

  LeasedWorld() {
    host.link_up(now);
    EXPECT_OK(host.receive(link.begin(now), now));
    exchange();
    // The first frame of the proxy starts its leases.
    ask(StoreOperation::kAdd, "n");
    pass(1s);
  }
  void ask(StoreOperation operation, const Key& key) { link.submit({operation, ++last_id, {key}, {}, 1}, 1, now); }
  /// Carries what is to be sent, both ways, until nothing is.
  void exchange() {
    for (bool more = true; more;) {
      Bytes up, down;
      link.write(up, now);
      auto input = host.receive(up, now);
      ASSERT_TRUE(input.has_value()) << input.error().to_string();
      for (Request& request : input->requests) {
        for (const Reply& reply : root.apply(std::move(request), kProxy)) host.reply(reply);
      }
      host.write(down, kLeaseTime);
      EXPECT_OK(link.receive(down, now));
      for (const Reply& reply : link.take_replies()) {
        if (!reply.values.empty()) values.push_back(to_string(reply.values[0]));
      }
      more = !up.empty() || !down.empty();
    }
  }
  void pass(Duration time) {
    for (const TimePoint end = now + time; now < end; exchange()) now = now + 100ms;
  }
  /// Another client's set; what it releases for the proxy.
  Replies set(const char* value) {
    Replies replies = root.apply({StoreOperation::kSet, ++last_id, {"k"}, {to_bytes(value)}}, kStranger);
    EXPECT_TRUE(std::ranges::any_of(replies, [](const Reply& reply) { return reply.client == kStranger; }))
        << "somebody holds a lease";
    std::erase_if(replies, [](const Reply& reply) { return reply.client == kStranger; });
    return replies;
  }
  void revoke() {
    Replies freed;
    host.end_grants(root.revoke(kProxy, freed));
  }

  TimePoint now{1'000'000'000};
  StoreState root;
  ServerSession host;
  ProxyLink link{{{true}, "above"}};
  RequestId last_id = 0;
  std::vector<std::string> values;
};

// It comes from another thread of the server, after the proxy's leases were revoked and it was heard again.
TEST(ProxyLink, UsesNoLeaseThatWasRevokedWhileTheGrantWasOnItsWay) {
  LeasedWorld world;
  world.ask(StoreOperation::kGet, "k");
  world.exchange();
  const Replies granted = world.set("old");
  ASSERT_EQ(granted.size(), 1U);
  EXPECT_TRUE(granted[0].leased);
  world.now = world.now + 2 * kLeaseEnd;
  world.revoke();
  world.pass(5s);
  EXPECT_GT(world.link.lease_left(world.now), Duration{0});
  world.host.reply(granted[0]);
  world.pass(100ms);
  EXPECT_EQ(world.values, std::vector<std::string>{"old"}) << "it is the answer, and no more";
  world.set("new");
  world.ask(StoreOperation::kGet, "k");
  world.pass(100ms);
  EXPECT_EQ(world.values, (std::vector<std::string>{"old", "new"}));
}

TEST(ProxyLink, UsesNoLeaseThatWasRevokedWhileTheGrantWaitedForTheLink) {
  LeasedWorld world;
  world.ask(StoreOperation::kGet, "k");
  world.exchange();
  for (const Reply& reply : world.set("old")) world.host.reply(reply);
  world.now = world.now + 2 * kLeaseEnd;
  world.revoke();
  Bytes beat;
  world.link.write(beat, world.now);  // heard before anything is written: leases of now
  EXPECT_OK(world.host.receive(beat, world.now));
  world.pass(100ms);
  EXPECT_GT(world.link.lease_left(world.now), Duration{0});
  world.set("new");
  world.ask(StoreOperation::kGet, "k");
  world.pass(100ms);
  EXPECT_EQ(world.values, (std::vector<std::string>{"old", "new"}));
}

TEST(ProxyLink, UsesALeaseThatWasGrantedSinceTheLastRevocation) {
  LeasedWorld world;
  world.now = world.now + 2 * kLeaseEnd;
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

TEST(ProxyLink, OfManyProxiesSendsAndWantsFramesMoreSeldom) {
  constexpr TimePoint kBegin{1'000'000'000};
  ProxyLink link({{true}, "above"});
  ServerSession host;
  host.link_up(kBegin);
  Bytes down, up;
  const auto go_up = [&](TimePoint now) {
    up.clear();
    link.write(up, now);
    EXPECT_OK(host.receive(up, now));
    return !up.empty();
  };
  EXPECT_OK(host.receive(link.begin(kBegin), kBegin));
  host.write(down, kLeaseTime);
  EXPECT_OK(link.receive(down, kBegin));
  EXPECT_EQ(host.pace(), 0ms);
  link.serves_proxies(100);
  link.submit({StoreOperation::kGet, 1, {"first"}}, 1, kBegin);
  EXPECT_TRUE(go_up(kBegin)) << "nothing was sent before";
  EXPECT_EQ(host.pace(), 40ms);
  link.submit({StoreOperation::kGet, 1, {"second"}}, 2, kBegin + 1ms);
  EXPECT_FALSE(go_up(kBegin + 1ms));
  EXPECT_EQ(link.next_wake(), kBegin + 40ms);
  link.serves_proxies(1000);
  EXPECT_FALSE(go_up(kBegin + 49ms));
  EXPECT_TRUE(go_up(kBegin + 50ms));
  EXPECT_EQ(host.pace(), kLongestPace);
}

TEST(SessionFrames, SurviveTheWireAndRefuseOthers) {
  const auto frame_of = [](const Bytes& bytes) {
    FrameParser parser(kMaxTierFrameBytes);
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
  EXPECT_EQ(session_of_hello(tier_hello(id)), id);
  EXPECT_FALSE(session_of_hello(as_bytes("muster store")).has_value());
}

TEST(SessionFrames, RefuseAMessageThatIsCutShort) {
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
