// Any program that can reach a port may connect to it. Thousands of unauthenticated peers must not delay an
// authenticated client or link, must not end a process, and must leave nothing behind. Runs for MUSTER_SOAK_SECONDS, or
// for a few seconds if that is not set.
#include "io/unauthenticated_peers.h"

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

constexpr uint64_t kManyPeers = 3000;
// The bound separates two behaviors and measures nothing. If connections were not evicted, a client or a link would
// wait until the handshakes of thousands of silent peers time out, which takes 10 s or more.
constexpr Duration kMaxDelay = 5s;

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
  UnauthenticatedPeers peers({root.address(), root.torch_address(), proxy.address()}, {.seed = announced_seed()});
  const TimePoint end = now() + soak_time();
  const Deadline deadline = Deadline::at(end + 120s);
  int64_t clients = 0;
  Duration longest{0};
  size_t most_bytes = bytes;
  while (now() < end || peers.accepted() < kManyPeers || clients < 100) {
    ASSERT_FALSE(deadline.passed()) << clients << " clients, " << peers.accepted() << " unauthenticated peers";
    for (const std::string& url : {root.url(), proxy.url()}) {
      const TimePoint begun = now();
      const auto client = open_store(url, test_secret(), soon());
      ASSERT_TRUE(client.has_value()) << client.error().to_string();
      longest = std::max(longest, now() - begun);
      EXPECT_EQ((*client)->add("clients", 1, soon()), ++clients);
      EXPECT_EQ((*client)->get("k", soon()), to_bytes("v"));
    }
    EXPECT_EQ(steady->add("clients", 0, soon()), clients);
    most_bytes = std::max(most_bytes, root.bytes());
    ASSERT_TRUE(root.runs() && proxy.runs());
  }
  peers.stop();
  EXPECT_LT(ms(longest), ms(kMaxDelay)) << "a client waited for unauthenticated peers";
  while (root.descriptors() > files && !soon().passed() && !deadline.passed()) EXPECT_OK(steady->wait({"k"}, soon()));
  EXPECT_LE(root.descriptors(), files) << "connections of unauthenticated peers stay open";
  EXPECT_LT(most_bytes, bytes + (size_t{256} << 20)) << "memory for announced lengths is allocated";
  std::printf("%lld clients connected, the slowest in %.1f ms; the root grew by %.1f MiB; unauthenticated peers: %s\n",
              static_cast<long long>(clients), ms(longest), static_cast<double>(most_bytes - bytes) / (1 << 20),
              peers.summary().c_str());
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
  UnauthenticatedPeers peers({address}, {.seed = announced_seed()});
  const TimePoint end = now() + soak_time();
  const Deadline deadline = Deadline::at(end + 120s);
  int64_t links = 0;
  Duration longest{0};
  while (now() < end || peers.accepted() < kManyPeers || links < 100) {
    ASSERT_FALSE(deadline.passed()) << links << " links, " << peers.accepted() << " unauthenticated peers";
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
  peers.stop();
  EXPECT_LT(ms(longest), ms(kMaxDelay)) << "a link waited for unauthenticated peers";
  std::printf("%lld links were made, the slowest in %.1f ms; unauthenticated peers: %s\n",
              static_cast<long long>(links), ms(longest), peers.summary().c_str());
}

}  // namespace
}  // namespace muster
