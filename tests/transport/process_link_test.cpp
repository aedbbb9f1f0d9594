// The contract suite for every kind of link between processes, with both ends on one loop.
#include <array>

#include "contract/link_contract.h"
#include "muster/transport/striped_link.h"
#include "transport/link_kinds.h"

namespace muster {
namespace {

class LoopPair final : public LinkPair {
 public:
  static std::unique_ptr<LinkPair> make(const ProcessLinkKind& kind, int subflows) {
    auto pair = std::make_unique<LoopPair>();
    auto loop = Loop::create();
    if (!loop) return nullptr;
    pair->loop_ = std::move(*loop);
    std::vector<std::unique_ptr<Link>> left, right;
    auto listener = kind.listen(*pair->loop_, kind.identity(0),
                                [&](std::unique_ptr<Link> link) { left.push_back(std::move(link)); });
    if (!listener) return nullptr;
    for (size_t count = 1; count <= static_cast<size_t>(subflows); ++count) {
      const auto dial = kind.connect(*pair->loop_, (*listener)->address(), kind.identity(1), 0, test_deadline(),
                                     [&](Result<std::unique_ptr<Link>> link) {
                                       ASSERT_TRUE(link) << link.error().to_string();
                                       right.push_back(std::move(*link));
                                     });
      const auto both = [&] { return left.size() == count && right.size() == count; };
      if (!pair->loop_->run_until(both, test_deadline())) return nullptr;
    }
    pair->left = subflows == 1 ? std::move(left[0]) : striped_link(std::move(left));
    pair->right = subflows == 1 ? std::move(right[0]) : striped_link(std::move(right));
    return pair;
  }
  ~LoopPair() override {
    left.reset();  // the links must be destroyed before the loop
    right.reset();
  }

  Loop& loop() { return *loop_; }
  Result<> run_until(const std::function<bool()>& done) override { return loop_->run_until(done, test_deadline()); }
  bool settle() override {
    for (int turns = 0; turns < 1'000'000; ++turns) {
      if (!loop_->run_once(Deadline::after(std::chrono::milliseconds(20)))) return true;
    }
    return false;
  }

 private:
  std::unique_ptr<Loop> loop_;
};

std::vector<LinkKind> contract_kinds() {
  std::vector<LinkKind> kinds;
  for (const ProcessLinkKind& kind : process_link_kinds()) {
    kinds.push_back({kind.name, [kind] { return LoopPair::make(kind, 1); }});
    kinds.push_back({kind.name + "Striped", [kind] { return LoopPair::make(kind, 3); }});
  }
  return kinds;
}

INSTANTIATE_TEST_SUITE_P(Process, LinkContract, testing::ValuesIn(contract_kinds()), kind_name);

/// A poll without data must not count as progress. Otherwise a waiting thread would never yield its core, which the
/// peer may need.
TEST(ShmLink, MakesNoProgressWhileIdle) {
  for (const ProcessLinkKind& kind : process_link_kinds()) {
    if (!kind.shm) continue;
    const auto pair = LoopPair::make(kind, 1);
    ASSERT_TRUE(pair);
    Loop& loop = static_cast<LoopPair&>(*pair).loop();
    std::array<uint8_t, 2> bytes{7, 0};
    const Segment into{&bytes[1], 1};
    bool received = false;
    // The dialing end has its rings mapped from the start. The other end maps them a moment later.
    pair->right->receive({&into, 1}, [&](const Result<>& result) { received = result.has_value(); });
    EXPECT_EQ(loop.idle_time(std::chrono::seconds(1)), Duration::zero()) << "it looks before it sleeps";
    EXPECT_FALSE(loop.run_pollers());
    const ConstSegment from{&bytes[0], 1};
    pair->left->send({&from, 1}, [](const Result<>& result) { EXPECT_TRUE(result); });
    ASSERT_TRUE(pair->run_until([&] { return received; }));
    EXPECT_EQ(bytes[1], 7);
  }
}

}  // namespace
}  // namespace muster
