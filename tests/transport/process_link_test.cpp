// The contract over every kind of link between processes, with both ends on one loop.
#include "contract/link_contract.h"
#include "muster/transport/striped_link.h"
#include "transport/link_kinds.h"

namespace muster {
namespace {

class LoopPair final : public LinkPair {
 public:
  static std::unique_ptr<LinkPair> make(const ProcessLinkKind& kind, int lanes) {
    auto pair = std::make_unique<LoopPair>();
    auto loop = Loop::create();
    if (!loop) return nullptr;
    pair->loop_ = std::move(*loop);
    std::vector<std::unique_ptr<Link>> left, right;
    auto listener = kind.listen(*pair->loop_, kind.identity(0),
                                [&](std::unique_ptr<Link> link) { left.push_back(std::move(link)); });
    if (!listener) return nullptr;
    for (size_t count = 1; count <= static_cast<size_t>(lanes); ++count) {
      const auto dial = kind.connect(*pair->loop_, (*listener)->address(), kind.identity(1), 0, patience(),
                                     [&](Result<std::unique_ptr<Link>> link) {
                                       ASSERT_TRUE(link) << link.error().to_string();
                                       right.push_back(std::move(*link));
                                     });
      const auto both = [&] { return left.size() == count && right.size() == count; };
      if (!pair->loop_->run_until(both, patience())) return nullptr;
    }
    pair->left = lanes == 1 ? std::move(left[0]) : striped_link(std::move(left));
    pair->right = lanes == 1 ? std::move(right[0]) : striped_link(std::move(right));
    return pair;
  }
  ~LoopPair() override {
    left.reset();  // before the loop
    right.reset();
  }

  Result<> run_until(const std::function<bool()>& done) override { return loop_->run_until(done, patience()); }
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

}  // namespace
}  // namespace muster
