// Checks the load generator's requests with muster's own protocol parser, and its clients with a real server.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <set>

#include "cases.h"
#include "muster/io/socket.h"
#include "muster/store/protocol/protocol.h"
#include "muster/store/server/server.h"
#include "startup.h"
#include "storm.h"

namespace muster::load {
namespace {

using testing::HasSubstr;

Deadline soon() { return Deadline::after(60s); }

// The answers of a server to the steps of one client, in order.
class AnsweringServer {
 public:
  AnsweringServer() { EXPECT_EQ(answer(greet()), greet().reply); }

  Bytes answer(const Step& step) {
    Bytes out;
    protocol_->feed(step.request);
    for (auto request = protocol_->next(out); request && *request; request = protocol_->next(out)) {
      for (const Reply& reply : state_.apply(std::move(**request), 1)) EXPECT_TRUE(protocol_->encode(reply, out));
    }
    return out;
  }

 private:
  std::unique_ptr<Protocol> protocol_ = torch_protocol();
  StoreState state_;
};

TEST(StoreLoadProtocol, EveryStepGetsItsExpectedReply) {
  const Bytes value = to_bytes("value");
  AnsweringServer server;
  for (const Step& step : {set("a", value), get("a", value), wait({"a"}), multi_set({"b", "c"}, value),
                           multi_get({"a", "b", "c"}, value), barrier("d", 1), ping()}) {
    EXPECT_EQ(server.answer(step), step.reply);
    EXPECT_EQ(step.reply.size(), step.reply_bytes);
  }
}

TEST(StoreLoadProtocol, AnAddReplyHasTheExpectedLength) {
  AnsweringServer server;
  EXPECT_EQ(server.answer(add("n", 3)).size(), add("n", 3).reply_bytes);
}

TEST(StoreLoadPeers, EveryExchangeGivesEachRankAValidNeighbor) {
  for (const Exchange exchange : {Exchange::kFullMesh, Exchange::kDoubling, Exchange::kRingAndTree}) {
    for (const size_t workers : {2, 7, 8, 9, 24, 64, 129}) {
      const Peers peers{workers, 8, exchange};
      std::vector<size_t> read(workers);
      for (size_t rank = 0; rank < workers; ++rank) {
        for (size_t i = 0; i < peers.count(rank); ++i) {
          ASSERT_LT(peers.peer(rank, i), workers);
          ++read[peers.peer(rank, i)];
        }
      }
      EXPECT_THAT(read, testing::Each(testing::Ge(1u))) << workers;
    }
  }
}

TEST(StoreLoadPeers, TreeLinksEachNodeAndItsParentBothWays) {
  const Peers peers{.workers = 80, .workers_per_node = 8, .exchange = Exchange::kRingAndTree};
  std::set<std::pair<size_t, size_t>> links;
  for (size_t rank = 0; rank < peers.workers; rank += 8) {
    for (size_t i = 2; i < peers.count(rank); ++i) links.insert({rank, peers.peer(rank, i)});
  }
  EXPECT_EQ(links.size(), 2 * (peers.nodes() - 1));
  for (const auto& [from, to] : links) EXPECT_TRUE(links.contains({to, from})) << from << " " << to;
}

class StoreLoad : public testing::Test {
 protected:
  StoreLoad() {
    StoreServerOptions options;
    options.torch_listen = options.muster_listen = {*Address::parse("127.0.0.1:0")};
    server_ = *StoreServer::start(options, soon());
    setting_.server = server_->torch_addresses()[0];
    setting_.pid = getpid();
    setting_.prefix = "test";
    setting_.connections = 20;
    setting_.rounds = 2;
    setting_.keys = 100;
    setting_.duration = 1ms;
    setting_.deadline = soon();
  }

  std::unique_ptr<StoreServer> server_;
  Setting setting_;
};

TEST_F(StoreLoad, EveryCaseMeasuresARealServer) {
  std::vector<Case> all = closed_loops();
  for (const auto& more : {crowds(), arrivals()}) all.insert(all.end(), more.begin(), more.end());
  for (const Case& one : all) {
    if (std::string_view(one.name) == "killed") continue;  // forks, so tests/python/test_bench_store.py tests it
    const auto figures = one.measure(setting_);
    ASSERT_TRUE(figures) << one.name << ": " << figures.error().to_string();
    EXPECT_FALSE(figures->empty()) << one.name;
  }
}

TEST_F(StoreLoad, StartupCompletesWithEveryExchange) {
  for (const Exchange exchange : {Exchange::kFullMesh, Exchange::kDoubling, Exchange::kRingAndTree}) {
    setting_.prefix = "startup" + std::to_string(static_cast<int>(exchange));
    const auto figures = measure_startup(setting_, {{24, 8, exchange}, {setting_.server}, ""});
    ASSERT_TRUE(figures) << figures.error().to_string();
    EXPECT_GT((*figures)["messages"], 24 * 3);
  }
}

TEST_F(StoreLoad, StartupOfWorkersOnlyHasNoAgentRequests) {
  Startup startup{{24, 8, Exchange::kRingAndTree}, {setting_.server}, ""};
  const auto keys_of = [&](const std::string& prefix) {
    setting_.prefix = prefix;
    const uint64_t before = server_->stat().keys;
    EXPECT_TRUE(measure_startup(setting_, startup));
    return server_->stat().keys - before;
  };
  const uint64_t all = keys_of("with agents");
  startup.agents = false;
  EXPECT_EQ(keys_of("workers"), all - 6) << "a role and a rank of each of three nodes";
}

TEST_F(StoreLoad, StartupLoadBehindProxiesCostsTheRootFewMessages) {
  const std::string url = "tcp://" + server_->muster_addresses()[0].to_string();
  const auto figures = measure_storm(setting_, {{64, 8, Exchange::kRingAndTree}, {url}, url});
  ASSERT_TRUE(figures) << figures.error().to_string();
  // Each of 64 workers sends at least 2 + 3 * 2 + 1 requests, and each request has a reply.
  EXPECT_LT((*figures)["messages"], 64 * 9 * 2 / 3);
}

TEST_F(StoreLoad, NamesALostServerAsTheReason) {
  auto fleet = *Fleet::create(true);
  ASSERT_TRUE(fleet.connect(setting_.server, 3, soon()));
  const Step step = wait({"never"});
  ASSERT_TRUE(fleet.begin(1, step));
  server_.reset();
  const auto driven = fleet.drive(soon());
  ASSERT_FALSE(driven);
  EXPECT_EQ(driven.error().code, ErrorCode::kPeerLost);
}

TEST_F(StoreLoad, EndsAtTheDeadlineWithoutAReply) {
  auto fleet = *Fleet::create(true);
  ASSERT_TRUE(fleet.connect(setting_.server, 1, soon()));
  const Step step = wait({"never"});
  ASSERT_TRUE(fleet.begin(0, step));
  const auto driven = fleet.drive(Deadline::after(1ms));
  ASSERT_FALSE(driven);
  EXPECT_THAT(driven.error().message, HasSubstr("1 of 1 clients have no reply"));
}

TEST(StoreLoadFloor, AnswersHaveTheRightLengthButFailChecks) {
  const Step question = get("key", to_bytes("value")), greeting = greet();
  const Fd listener = *listen_on(*Address::parse("127.0.0.1:0"));
  const EchoPlan plan{{greeting.request.size(), greeting.reply_bytes},
                      {{question.request.size(), question.reply_bytes}}};
  const pid_t child = fork();
  if (child == 0) {
    (void)serve_echo(listener.get(), plan);
    _exit(1);
  }
  auto unchecked = *Fleet::create(false);
  ASSERT_TRUE(unchecked.connect(*local_address(listener.get()), 2, soon()));
  ASSERT_TRUE(unchecked.begin(0, question));
  EXPECT_TRUE(unchecked.drive(soon()));
  auto checked = *Fleet::create(true);
  const auto refused = checked.connect(*local_address(listener.get()), 1, soon());
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message, HasSubstr("wrong answer"));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace muster::load
