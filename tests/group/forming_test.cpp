// A connection that opens and closes while a group forms.
#include <future>

#include "group/ranks.h"
#include "muster/group/form/rank_exchange.h"
#include "muster/store/request_store.h"

namespace muster {
namespace {

Deadline test_deadline() { return Deadline::after(std::chrono::seconds(60)); }

/// The store requests that forming needs. Reading the records of other ranks waits for `released`.
class HeldStore final : public RequestStore {
 public:
  HeldStore(std::shared_ptr<Store> base, std::shared_future<void> released)
      : base_(std::move(base)), released_(std::move(released)) {}
  Result<Bytes> get(const Key& key, const Deadline& deadline) override { return base_->get(key, deadline); }
  Result<Bytes> compare_set(const Key& key, ByteView expected, ByteView desired, const Deadline& deadline) override {
    return base_->compare_set(key, expected, desired, deadline);
  }
  Result<std::vector<Bytes>> multi_get(const std::vector<Key>& keys, const Deadline& deadline) override {
    released_.wait();
    return base_->multi_get(keys, deadline);
  }
  Result<std::unique_ptr<Store>> clone() override { return std::make_unique<HeldStore>(base_, released_); }

 private:
  Result<Reply> call(Request, const Deadline&) override { return fail(ErrorCode::kUnsupported, "not held"); }

  const std::shared_ptr<Store> base_;
  const std::shared_future<void> released_;
};

/// Connects to the first rank as a rank that wants the host's shared memory does, but sends no request.
void connect_and_go(Store& store, const GroupSpec& membership, const Bytes& secret) {
  RankExchange ranks(store, membership);
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
