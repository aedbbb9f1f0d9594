// A connection that opens and closes while a group forms.
#include <future>

#include "group/ranks.h"
#include "muster/group/form/store_exchange.h"
#include "muster/store/state/state.h"

namespace muster {
namespace {

Deadline test_deadline() { return Deadline::after(std::chrono::seconds(60)); }

/// A store in which reading the records of other ranks waits for `released`.
class HeldStore final : public Store {
 public:
  HeldStore(std::shared_ptr<Store> base, std::shared_future<void> released)
      : base_(std::move(base)), released_(std::move(released)) {}
  Result<Reply> call(Request request, const Deadline& deadline) override {
    if (request.operation == StoreOperation::kMultiGet) released_.wait();
    return base_->call(std::move(request), deadline);
  }
  Result<std::unique_ptr<Store>> clone() override { return std::make_unique<HeldStore>(base_, released_); }

 private:
  const std::shared_ptr<Store> base_;
  const std::shared_future<void> released_;
};

/// Connects to the first rank as a rank that wants the host's shared memory does, but sends no request.
void connect_and_go(Store& store, const GroupSpec& membership, const Bytes& secret) {
  StoreExchange ranks(store, membership);
  const auto leader = ranks.first_rank(test_deadline());
  ASSERT_TRUE(leader);
  const auto loop = *Loop::create();
  std::optional<Result<Connection>> connection;
  const auto attempt = dial(*loop, *Address::parse(leader->local_address + "-host-comm"),
                            {.credentials = {secret, nullptr}, .retry = true}, test_deadline(),
                            [&](Result<Connection> made) { connection = std::move(made); });
  ASSERT_TRUE(loop->run_until([&] { return connection.has_value(); }, test_deadline()));
  EXPECT_TRUE(*connection) << connection->error().to_string();
}

TEST(GroupForming, OutlivesAConnectionThatEndsWithoutARequest) {
  constexpr int kRanks = 3;
  const std::shared_ptr<Store> store = memory_store();
  std::promise<void> gone;
  const auto released = gone.get_future().share();
  GroupOptions options = test::options_for("shm");
  options.credentials.secret = to_bytes("a secret of the tests");
  test::run_ranks(kRanks + 1, [&](Rank rank) {
    const GroupSpec membership{rank, kRanks, "forming", 0};
    if (rank == kRanks) {
      connect_and_go(*store, {0, kRanks, "forming", 0}, options.credentials.secret);
      return gone.set_value();
    }
    HeldStore held(store, released);  // the last rank connects after that connection has closed
    const auto group = Group::form(rank == kRanks - 1 ? static_cast<Store&>(held) : *store, membership, options);
    ASSERT_TRUE(group) << group.error().to_string();
    EXPECT_EQ((*group)->transport(), "shm");
    EXPECT_TRUE((*group)->barrier().result());
  });
}

}  // namespace
}  // namespace muster
