#include "muster/group/p2p/matcher.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <list>
#include <memory>
#include <vector>

#include "muster/base/random.h"

namespace muster {
namespace {

struct Item {
  Rank from;
  uint32_t tag;
  int number;
};
using ItemPtr = std::shared_ptr<Item>;
using ItemMatcher = Matcher<ItemPtr, ItemPtr>;

ItemPtr item(Rank from, uint32_t tag, int number) { return std::make_shared<Item>(Item{from, tag, number}); }

ItemPtr post(ItemMatcher& matcher, Rank from, uint32_t tag, int number = 0) {
  return matcher.post(from, tag, item(from, tag, number));
}
ItemPtr arrive(ItemMatcher& matcher, Rank from, uint32_t tag, int number = 0) {
  return matcher.arrive(from, tag, item(from, tag, number));
}

TEST(Matcher, GivesMessagesOfOneSenderAndTagInOrder) {
  ItemMatcher matcher;
  EXPECT_FALSE(arrive(matcher, 1, 7, 10));
  EXPECT_FALSE(arrive(matcher, 1, 7, 11));
  EXPECT_FALSE(arrive(matcher, 1, 8, 12));
  EXPECT_EQ(post(matcher, 1, 8)->number, 12);
  EXPECT_EQ(post(matcher, 1, 7)->number, 10);
  EXPECT_EQ(post(matcher, 1, 7)->number, 11);
  EXPECT_FALSE(post(matcher, 1, 7));
}

TEST(Matcher, MatchesTheReceiveThatWasPostedFirst) {
  ItemMatcher matcher;
  EXPECT_FALSE(post(matcher, 2, 7, 20));
  EXPECT_FALSE(post(matcher, kAnyRank, 7, 21));
  EXPECT_FALSE(post(matcher, 2, 7, 22));
  EXPECT_EQ(arrive(matcher, 2, 7)->number, 20);
  EXPECT_EQ(arrive(matcher, 2, 7)->number, 21);
  EXPECT_EQ(arrive(matcher, 2, 7)->number, 22);
  EXPECT_FALSE(arrive(matcher, 2, 7));
}

TEST(Matcher, ServesSendersFairlyAtReceivesFromAnyRank) {
  ItemMatcher matcher;
  for (int round = 0; round < 3; ++round) {
    for (const Rank from : {5, 1, 3}) arrive(matcher, from, 0, round);
  }
  for (int round = 0; round < 3; ++round) {
    for (const Rank from : {5, 1, 3}) {
      const ItemPtr message = post(matcher, kAnyRank, 0);
      EXPECT_EQ(message->from, from);
      EXPECT_EQ(message->number, round);
    }
  }
}

TEST(Matcher, ForgetsAWithdrawnReceive) {
  ItemMatcher matcher;
  const ItemPtr first = item(1, 7, 0), second = item(1, 7, 1);
  EXPECT_FALSE(matcher.post(1, 7, first));
  EXPECT_FALSE(matcher.post(1, 7, second));
  EXPECT_TRUE(matcher.withdraw(1, 7, first));
  EXPECT_FALSE(matcher.withdraw(1, 7, first));
  EXPECT_EQ(arrive(matcher, 1, 7), second);
  EXPECT_FALSE(matcher.withdraw(1, 7, second));
}

TEST(Matcher, ForgetsUnfinishedMessagesOfALostSender) {
  ItemMatcher matcher;
  arrive(matcher, 1, 7, 0);
  arrive(matcher, 1, 7, 1);
  arrive(matcher, 2, 7, 2);
  matcher.forget(1, [](const ItemPtr& message) { return message->number == 0; });
  EXPECT_EQ(post(matcher, kAnyRank, 7)->number, 1);
  EXPECT_EQ(post(matcher, kAnyRank, 7)->number, 2);
  EXPECT_FALSE(post(matcher, kAnyRank, 7));
}

/// The matching rules in their simplest form, without optimization.
struct Model {
  std::list<ItemPtr> receives, messages;

  static bool matches(const Item& receive, const Item& message) {
    return receive.tag == message.tag && (receive.from == kAnyRank || receive.from == message.from);
  }
  ItemPtr post(const ItemPtr& receive) {
    for (auto it = messages.begin(); it != messages.end(); ++it) {
      if (matches(*receive, **it)) return take(messages, it);
    }
    receives.push_back(receive);
    return nullptr;
  }
  ItemPtr arrive(const ItemPtr& message) {
    for (auto it = receives.begin(); it != receives.end(); ++it) {
      if (matches(**it, *message)) return take(receives, it);
    }
    messages.push_back(message);
    return nullptr;
  }
  static ItemPtr take(std::list<ItemPtr>& from, std::list<ItemPtr>::iterator it) {
    const ItemPtr found = *it;
    from.erase(it);
    return found;
  }
};

void compare_with_model(uint64_t seed) {
  SCOPED_TRACE("MUSTER_SEED=" + std::to_string(seed));
  Random random(seed);
  ItemMatcher matcher;
  Model model;
  std::vector<ItemPtr> posted;
  for (int step = 0; step < 2000; ++step) {
    const auto tag = static_cast<uint32_t>(random.below(3));
    const uint64_t dice = random.below(20);
    if (dice < 9) {
      const ItemPtr message = item(static_cast<Rank>(random.below(4)), tag, step);
      ASSERT_EQ(matcher.arrive(message->from, tag, message), model.arrive(message)) << "step " << step;
    } else if (dice < 18 || posted.empty()) {
      const uint64_t from = random.below(5);
      const ItemPtr receive = item(from == 4 ? kAnyRank : static_cast<Rank>(from), tag, step);
      ASSERT_EQ(matcher.post(receive->from, tag, receive), model.post(receive)) << "step " << step;
      posted.push_back(receive);
    } else {
      const ItemPtr receive = posted[random.below(posted.size())];
      const bool waits = std::erase(model.receives, receive) > 0;
      ASSERT_EQ(matcher.withdraw(receive->from, receive->tag, receive), waits) << "step " << step;
    }
  }
}

TEST(Matcher, MatchesTheReferenceModel) {
  const char* fixed = std::getenv("MUSTER_SEED");
  if (fixed != nullptr) return compare_with_model(std::strtoull(fixed, nullptr, 10));
  for (uint64_t seed = 1; seed <= 20; ++seed) compare_with_model(seed);
}

}  // namespace
}  // namespace muster
