#include "muster/store/server/expiry.h"

#include <gtest/gtest.h>

#include "store/manual_clock.h"

namespace muster {
namespace {

struct SessionExpiryTest : testing::Test {
  ManualClock clock;
  SessionExpiry expiry{clock, {.lease_time = 4s, .link_grace = 30s}};
  SessionExpiryTest() { expiry.link_up(); }
};

TEST_F(SessionExpiryTest, KeepsTheSessionOfALiveProxy) {
  for (int i = 0; i < 100; ++i) {
    expiry.grant(1, Duration::max());
    clock.pass(kKeepaliveInterval);
    expiry.heard();
    const auto expired = expiry.expired(1);
    EXPECT_FALSE(expired.leases || expired.link || expired.session);
  }
}

TEST_F(SessionExpiryTest, EndsLeasesLaterThanTheProxyDoes) {
  EXPECT_EQ(expiry.grant(1, Duration::max()).lease, 4s);
  clock.pass(5s);
  EXPECT_FALSE(expiry.expired(1).leases) << "a clock may run a quarter slower";
  clock.pass(1ms);
  EXPECT_TRUE(expiry.expired(1).leases);
  EXPECT_FALSE(expiry.expired(1).link);
}

TEST_F(SessionExpiryTest, LeasesEndWithTheLongestGrant) {
  expiry.grant(8 * kProxiesPerInterval, Duration::max());
  expiry.grant(1, Duration::max());
  clock.pass(8 * 5s);
  EXPECT_FALSE(expiry.expired(1).leases);
  EXPECT_EQ(expiry.leases_end(), clock.now());
}

TEST_F(SessionExpiryTest, GrantsNoMoreThanTheServerHas) {
  EXPECT_EQ(expiry.grant(1, 1s).lease, 1s);
  EXPECT_EQ(expiry.grant(1, Duration{0}).lease, Duration{0});
  EXPECT_EQ(expiry.leases_end(), clock.now() + 1250ms);
}

TEST_F(SessionExpiryTest, ManyProxiesSendKeepalivesLessOften) {
  EXPECT_EQ(expiry.grant(1, Duration::max()).keepalive_interval, kKeepaliveInterval);
  EXPECT_EQ(expiry.grant(4 * kProxiesPerInterval, Duration::max()).keepalive_interval, 4 * kKeepaliveInterval);
  EXPECT_EQ(expiry.grant(100 * kProxiesPerInterval, Duration::max()).lease, 4s * kMaxIntervalGrowth);
}

TEST_F(SessionExpiryTest, EndsASilentLinkThenTheSession) {
  clock.pass(20s);
  EXPECT_FALSE(expiry.expired(1).link);
  clock.pass(1ms);
  EXPECT_TRUE(expiry.expired(1).link);
  EXPECT_FALSE(expiry.expired(8 * kProxiesPerInterval).link) << "three keepalives have not been missed yet";
  expiry.link_lost();
  clock.pass(30s);
  EXPECT_FALSE(expiry.expired(1).session || expiry.expired(1).link);
  clock.pass(1ms);
  EXPECT_TRUE(expiry.expired(1).session);
}

TEST_F(SessionExpiryTest, ANewLinkContinuesTheSession) {
  expiry.link_lost();
  clock.pass(29s);
  expiry.link_lost();  // the reader and the writer may both report the loss
  clock.pass(500ms);
  expiry.link_up();
  clock.pass(10s);
  EXPECT_FALSE(expiry.expired(1).session || expiry.expired(1).link);
}

TEST_F(SessionExpiryTest, AShortGraceEndsASilentLinkSooner) {
  SessionExpiry hasty(clock, {.lease_time = 1s, .link_grace = 6s});
  hasty.link_up();
  clock.pass(6s + 1ms);
  EXPECT_TRUE(hasty.expired(1).link);
}

TEST(RequestTimeouts, FindClientsThatSendNothingMore) {
  ManualClock clock;
  RequestTimeouts timeouts(clock, 60s);
  EXPECT_FALSE(timeouts.next().has_value());
  EXPECT_TRUE(timeouts.heard(1));
  EXPECT_EQ(timeouts.next(), clock.now() + 60s);
  clock.pass(10s);
  EXPECT_FALSE(timeouts.heard(2)) << "next() is set already";
  clock.pass(50s);
  EXPECT_EQ(timeouts.take_expired(), std::vector<ClientId>{1});
  EXPECT_EQ(timeouts.next(), clock.now() + 10s);
  clock.pass(10s);
  EXPECT_EQ(timeouts.take_expired(), std::vector<ClientId>{2});
  EXPECT_FALSE(timeouts.next().has_value());
}

TEST(RequestTimeouts, WaitAnewForAClientThatSendsMore) {
  ManualClock clock;
  RequestTimeouts timeouts(clock, 60s);
  timeouts.heard(1);
  clock.pass(59s);
  timeouts.heard(1);
  clock.pass(1s);
  EXPECT_TRUE(timeouts.take_expired().empty());
  ASSERT_TRUE(timeouts.next().has_value());
  clock.pass(*timeouts.next() - clock.now());
  EXPECT_EQ(timeouts.take_expired(), std::vector<ClientId>{1});
}

}  // namespace
}  // namespace muster
