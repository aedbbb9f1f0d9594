#include "muster/store/url.h"

#include <unistd.h>

#include <cstdlib>

#include "muster/store/store.h"
#include "store/expect.h"

namespace muster {
namespace {

TEST(Url, SplitsIntoItsParts) {
  auto url = Url::parse("redis://me:se%40cret@a.example:1,[::1],c/one/two%2F?x=1&y=&z", 6379);
  ASSERT_TRUE(url.has_value()) << url.error().to_string();
  EXPECT_EQ(url->scheme, "redis");
  EXPECT_EQ(url->user, "me");
  EXPECT_EQ(url->password, "se@cret");
  ASSERT_EQ(url->hosts.size(), 3U);
  EXPECT_EQ(url->hosts[0].host, "a.example");
  EXPECT_EQ(url->hosts[0].port, 1);
  EXPECT_EQ(url->hosts[1].host, "::1");
  EXPECT_EQ(url->hosts[2].port, 6379);
  EXPECT_EQ(url->path, "one/two/");
  EXPECT_EQ(url->take("x", ""), "1");
  EXPECT_EQ(url->take("absent", "otherwise"), "otherwise");
  expect_error(url->finish("only a and b"), ErrorCode::kInvalidArgument, "only a and b");
}

TEST(Url, NeedsNoLoginAndNoPath) {
  const auto url = Url::parse("etcd://host", 2379);
  EXPECT_EQ(url->user + url->password + url->path, "");
  EXPECT_EQ(url->hosts.at(0).port, 2379);
  EXPECT_EQ(Url::parse("redis+unix:///run/redis.sock", 0)->path, "run/redis.sock");
  EXPECT_TRUE(Url::parse("redis+unix:///run/redis.sock", 0)->hosts.empty());
}

TEST(Url, RefusesInvalidUrlsAndHidesThePassword) {
  for (const char* text : {"redis", "redis://host:99999", "redis://:p@,", "redis://a/%4", "redis://a/%zz"}) {
    expect_error(Url::parse(text, 1), ErrorCode::kInvalidArgument, "URL");
  }
  const auto refused = Url::parse("redis://me:hidden@host:port", 1);
  expect_error(refused, ErrorCode::kInvalidArgument, "me:***@host");
  EXPECT_EQ(refused.error().message.find("hidden"), std::string::npos) << refused.error().message;
  EXPECT_EQ(without_password("tcp://host:1/a"), "tcp://host:1/a");
  EXPECT_EQ(without_password("redis://:a/b@c@host/x"), "redis://:***@host/x");
  EXPECT_EQ(without_password("memory:"), "memory:");
}

TEST(OpenStore, ListsTheKnownUrls) {
  const Deadline soon = Deadline::after(60s);
  expect_error(open_store("gopher://me:hidden@host", {}, soon), ErrorCode::kInvalidArgument, "redis[s]://host:port");
  expect_error(open_store("redis://a,b", {}, soon), ErrorCode::kInvalidArgument, "one host");
  expect_error(open_store("redis://a/?nothing=1", {}, soon), ErrorCode::kInvalidArgument, "nothing");
}

TEST(OpenStore, GivesEachGenerationOfAJobKeysOfItsOwn) {
  const std::string url = "file://" + testing::TempDir() + "/muster-generations-" + std::to_string(getpid());
  const Deadline soon = Deadline::after(60s);
  setenv("MUSTER_STORE", url.c_str(), 1);
  for (const char* generation : {"0", "1"}) {
    setenv("MUSTER_GENERATION", generation, 1);
    const auto store = store_from_environment(soon);
    ASSERT_TRUE(store.has_value()) << store.error().to_string();
    EXPECT_EQ((*store)->add("n", 1, soon), 1);
  }
  unsetenv("MUSTER_GENERATION");
  EXPECT_EQ((*store_from_environment(soon))->list_keys("", soon),
            (std::vector<Key>{"generation/0/n", "generation/1/n"}));
  setenv("MUSTER_RUN_ID", "job", 1);
  expect_error(store_from_environment(soon), ErrorCode::kInvalidArgument, "MUSTER_GENERATION is not set");
  unsetenv("MUSTER_RUN_ID");
  unsetenv("MUSTER_STORE");
  unlink(url.substr(std::string("file://").size()).c_str());
}

}  // namespace
}  // namespace muster
