#include "contract/ttl_lock_contract.h"

namespace muster {
namespace {

struct MemoryWorld : StoreWorld {
  std::unique_ptr<Store> open() override { return *memory->clone(); }
  std::unique_ptr<Store> memory = memory_store();
};
struct PrefixWorld : StoreWorld {
  std::unique_ptr<Store> open() override { return prefix_store("prefix", *memory->clone()); }
  std::unique_ptr<Store> memory = memory_store();
};
std::unique_ptr<StoreWorld> make_memory_world() { return std::make_unique<MemoryWorld>(); }
std::unique_ptr<StoreWorld> make_prefix_world() { return std::make_unique<PrefixWorld>(); }

INSTANTIATE_TEST_SUITE_P(Memory, StoreContract, testing::Values(make_memory_world));
INSTANTIATE_TEST_SUITE_P(PrefixOverMemory, StoreContract, testing::Values(make_prefix_world));

INSTANTIATE_TEST_SUITE_P(Memory, TtlLockContract, testing::Values(make_memory_world));
INSTANTIATE_TEST_SUITE_P(PrefixOverMemory, TtlLockContract, testing::Values(make_prefix_world));

TEST(PrefixStore, SeparatesPrefixes) {
  const auto memory = memory_store();
  const auto a = prefix_store("a", *memory), b = prefix_store("b", *memory);
  const Deadline soon = Deadline::after(60s);
  EXPECT_OK(a->set("k", as_bytes("of a"), soon));
  EXPECT_OK(b->set("k", as_bytes("of b"), soon));
  EXPECT_EQ(a->get("k", soon), to_bytes("of a"));
  EXPECT_EQ(memory->get("b/k", soon), to_bytes("of b"));
  EXPECT_EQ(a->list_keys("", soon), std::vector<Key>{"k"});
  EXPECT_EQ(a->num_keys(soon), 2) << "the whole store's, as in torch";
}

TEST(PrefixStore, Nests) {
  const auto memory = memory_store();
  const auto inner = prefix_store("inner", prefix_store("outer", *memory));
  EXPECT_OK(inner->set("k", as_bytes("v"), Deadline::after(60s)));
  EXPECT_EQ(memory->list_keys("", Deadline::after(60s)), std::vector<Key>{"outer/inner/k"});
}

}  // namespace
}  // namespace muster
