#include "contract/link_contract.h"
#include "sim/sim_world.h"

namespace muster {
namespace {

class SimPair final : public LinkPair {
 public:
  explicit SimPair(sim::Faults faults) : world_(42, faults) { std::tie(left, right) = world_.connect(0, 1); }
  Result<> run_until(const std::function<bool()>& done) override {
    return world_.run_until(done, Deadline::after(std::chrono::hours(1), world_.clock()));
  }
  bool settle() override {
    for (int events = 0; events < 1'000'000; ++events) {
      if (!world_.step()) return true;
    }
    return false;
  }

 private:
  sim::World world_;
};

LinkKind sim_kind(const char* name, double short_read) {
  sim::Faults faults;
  faults.short_read = short_read;
  return {name, [faults] { return std::make_unique<SimPair>(faults); }};
}

INSTANTIATE_TEST_SUITE_P(Sim, LinkContract, testing::Values(sim_kind("Whole", 0), sim_kind("Split", 0.3)), kind_name);

}  // namespace
}  // namespace muster
