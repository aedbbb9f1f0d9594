// Any program that can reach a port may connect to it. Thousands of unauthenticated peers must not delay an
// authenticated client or link, must not end a process, and must leave nothing behind. Runs for MUSTER_SOAK_SECONDS, or
// for a few seconds if that is not set.
#include "io/strangers.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "muster/transport/socket/socket_link.h"
#include "store/expect.h"
#include "store/linear_run.h"
#include "store/store_process.h"
#include "store/test_server.h"

namespace muster {
namespace {

Deadline soon() { return test_deadline(); }
TimePoint now() { return steady_clock().now(); }
double ms(Duration time) { return static_cast<double>(time.count()) * 1e-6; }

constexpr uint64_t kOversubscribedRanks = 3000;

uint64_t announced_seed() {
  const uint64_t seed = seed_or(1);
  std::printf("MUSTER_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

TEST(UnauthenticatedPeers, DelayNoClientOfAStore) {
  raise_descriptor_limit();
  StoreProcess root;
  StoreProcess proxy(root.url());
  const auto steady = open_or_fail(proxy.url());  // a client that stays connected
  EXPECT_OK(steady->set("k", as_bytes("v"), soon()));
  const size_t files = root.descriptors(), bytes = root.bytes();
  Strangers strangers({root.address(), root.torch_address(), proxy.address()}, {.seed = announced_seed()});
  const TimePoint end = now() + soak_time();
  const Deadline deadline = Deadline::at(end + 120s);
  int64_t members = 0;
  Duration longest{0};
  size_t most_bytes = bytes;
  while (now() < end || strangers.came() < kOversubscribedRanks || members < 100) {
    ASSERT_FALSE(deadline.passed()) << members << " members, " << strangers.came() << " strangers";
    for (const std::string& url : {root.url(), proxy.url()}) {
      const TimePoint begun = now();
      const auto member = open_store(url, test_secret(), soon());
      ASSERT_TRUE(member.has_value()) << member.error().to_string();
      longest = std::max(longest, now() - begun);
      EXPECT_EQ((*member)->add("members", 1, soon()), ++members);
      EXPECT_EQ((*member)->get("k", soon()), to_bytes("v"));
    }
    EXPECT_EQ(steady->add("members", 0, soon()), members);
    most_bytes = std::max(most_bytes, root.bytes());
    ASSERT_TRUE(root.runs() && proxy.runs());
  }
  strangers.stop();
  while (root.descriptors() > files && !soon().passed() && !deadline.passed()) EXPECT_OK(steady->wait({"k"}, soon()));
  EXPECT_LE(root.descriptors(), files) << "connections of strangers stay open";
  EXPECT_LT(most_bytes, bytes + (size_t{256} << 20)) << "what strangers announce is allocated";
  std::printf("%lld members came, the slowest in %.1f ms; the root grew by %.1f MiB; strangers: %s\n",
              static_cast<long long>(members), ms(longest), static_cast<double>(most_bytes - bytes) / (1 << 20),
              strangers.figures().c_str());
}

TEST(UnauthenticatedPeers, DelayNoLink) {
  raise_descriptor_limit();
  const auto loop = std::move(*Loop::create());
  const auto self = [](Rank rank) {
    LinkIdentity identity{.rank = rank, .size = 2, .group = "g"};
    identity.credentials.secret = test_secret();
    return identity;
  };
  std::unique_ptr<Link> incoming;
  const auto listener = listen_links(*loop, *Address::parse("127.0.0.1:0"), self(0),
                                     [&](std::unique_ptr<Link> link) { incoming = std::move(link); });
  ASSERT_TRUE(listener.has_value()) << listener.error().to_string();
  const Address address = *Address::parse((*listener)->address());
  Strangers strangers({address}, {.seed = announced_seed()});
  const TimePoint end = now() + soak_time();
  const Deadline deadline = Deadline::at(end + 120s);
  int64_t links = 0;
  Duration longest{0};
  while (now() < end || strangers.came() < kOversubscribedRanks || links < 100) {
    ASSERT_FALSE(deadline.passed()) << links << " links, " << strangers.came() << " strangers";
    const TimePoint begun = now();
    std::optional<Result<std::unique_ptr<Link>>> outgoing;
    const auto dial = connect_link(*loop, address, self(1), 0, soon(),
                                   [&](Result<std::unique_ptr<Link>> link) { outgoing = std::move(link); });
    EXPECT_OK(loop->run_until([&] { return outgoing && (!*outgoing || incoming); }, soon()));
    ASSERT_TRUE(outgoing && *outgoing) << (outgoing ? outgoing->error().to_string() : "no answer");
    longest = std::max(longest, now() - begun);
    bool ponged = false;
    (**outgoing)->ping([&] { ponged = true; });
    EXPECT_OK(loop->run_until([&] { return ponged; }, soon()));
    incoming.reset();
    ++links;
  }
  strangers.stop();
  std::printf("%lld links were made, the slowest in %.1f ms; strangers: %s\n", static_cast<long long>(links),
              ms(longest), strangers.figures().c_str());
}

}  // namespace
}  // namespace muster
