// Scans of many keys: list_keys, and num_keys with a prefix.
#include <gtest/gtest.h>

#include <algorithm>

#include "muster/store/server/backend.h"
#include "store/test_server.h"
#include "store/torch_client.h"

namespace muster {
namespace {

constexpr ClientId kScanner = 1, kWriter = 2;
constexpr int kManyKeys = 30'000;  // more keys than one step covers

Key numbered(int i) { return "key/" + std::to_string(i); }

Request set(Key key) { return {StoreOperation::kSet, 1, {std::move(key)}, {to_bytes("v")}}; }

void fill(StoreState& state) {
  for (int i = 0; i < kManyKeys; ++i) state.apply(set(numbered(i)), kWriter);
  state.apply(set("other"), kWriter);
}

std::vector<Key> all_numbered() {
  std::vector<Key> keys;
  for (int i = 0; i < kManyKeys; ++i) keys.push_back(numbered(i));
  std::sort(keys.begin(), keys.end());
  return keys;
}

std::vector<Key> sorted(std::vector<Key> keys) {
  std::sort(keys.begin(), keys.end());
  return keys;
}

class Scans : public testing::TestWithParam<unsigned> {};
INSTANTIATE_TEST_SUITE_P(Shards, Scans, testing::Values(1, 32));

TEST_P(Scans, TakeOneStepInASmallStore) {
  StoreState state(GetParam());
  for (int i = 0; i < 4000; ++i) state.apply(set(numbered(i)), kWriter);
  Scan scan({StoreOperation::kListKeys, 1, {""}}, kScanner);
  EXPECT_TRUE(state.scan(scan));
  EXPECT_EQ(scan.reply.keys.size(), 4000U);
}

TEST_P(Scans, ReportKeysThatExistAllTheTime) {
  StoreState state(GetParam());
  fill(state);
  Scan list({StoreOperation::kListKeys, 1, {"key/"}}, kScanner);
  Scan count({StoreOperation::kNumKeys, 2, {"key/"}}, kScanner);
  int steps = 1;
  for (; !state.scan(list); ++steps) {
    state.apply(set("key/new/" + std::to_string(steps)), kWriter);
    state.apply({StoreOperation::kDelete, 1, {"other"}}, kWriter);
  }
  EXPECT_GT(steps, 1);
  const std::vector<Key> found = sorted(list.reply.keys), expected = all_numbered();
  EXPECT_TRUE(std::includes(found.begin(), found.end(), expected.begin(), expected.end()));
  EXPECT_EQ(std::adjacent_find(found.begin(), found.end()), found.end()) << "no key is reported twice";
  while (!state.scan(count)) continue;
  EXPECT_EQ(count.reply.number, kManyKeys + steps - 1);
}

TEST_P(Scans, StartATableOverThatHasGrown) {
  StoreState state(GetParam());
  fill(state);
  Scan list({StoreOperation::kListKeys, 1, {"key/"}}, kScanner),
      count({StoreOperation::kNumKeys, 2, {"key/"}}, kScanner);
  ASSERT_FALSE(state.scan(list) || state.scan(count));
  for (int i = 0; i < 2 * kManyKeys; ++i) state.apply(set("more/" + std::to_string(i)), kWriter);
  while (!state.scan(list)) continue;
  while (!state.scan(count)) continue;
  EXPECT_EQ(sorted(list.reply.keys), all_numbered());
  EXPECT_EQ(count.reply.number, kManyKeys);
}

// The backend of a server with one thread.
TEST(LocalBackend, ServesOthersWhileAScanIsUnderWay) {
  StoreState state;
  fill(state);
  const auto loop = Loop::create();
  ASSERT_TRUE(loop.has_value());
  std::vector<ClientId> answered;
  const auto backend = local_backend(state, **loop, [&](Replies&& replies) {
    for (const Reply& reply : replies) answered.push_back(reply.client);
  });
  backend->submit({StoreOperation::kListKeys, 1, {"key/"}}, kScanner);
  backend->submit({StoreOperation::kNumKeys, 2, {"key/"}}, kScanner);
  backend->submit(set("other"), kWriter);
  EXPECT_EQ(answered, std::vector<ClientId>{kWriter});
  ASSERT_TRUE((*loop)->run_until([&] { return answered.size() == 3; }, test_deadline()).has_value());
  EXPECT_EQ(answered, (std::vector<ClientId>{kWriter, kScanner, kScanner}));
  EXPECT_EQ(state.apply({StoreOperation::kNumKeys, 1, {"key/"}}, kScanner).at(0).number, kManyKeys);
}

TEST(StoreServer, ListsManyKeysToClientsOfBothProtocols) {
  const TestServer server;
  const TestServer proxy(server.tcp_url());
  const auto store = open_or_fail(server.tcp_url()), below = open_or_fail(proxy.tcp_url());
  std::vector<Key> keys = all_numbered();
  ASSERT_TRUE(store->multi_set(keys, std::vector<Bytes>(keys.size()), test_deadline()).has_value());
  EXPECT_EQ(store->list_keys("key/", test_deadline()), keys);
  EXPECT_EQ(below->list_keys("key/", test_deadline()), keys);
  EXPECT_EQ(store->num_keys(test_deadline()), kManyKeys);
  TorchClient client(server.torch_address());
  const auto outcome = client.call({StoreOperation::kListKeys, 1, {""}}, test_deadline());
  ASSERT_TRUE(outcome.reply.has_value());
  EXPECT_EQ(sorted(outcome.reply->keys), keys);
}

}  // namespace
}  // namespace muster
