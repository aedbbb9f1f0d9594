#include "muster/collective/cost/tuning.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "muster/base/random.h"
#include "muster/collective/cost/cost.h"

namespace muster::test {
namespace {

using testing::HasSubstr;

/// Creates a directory for the tuning record, and sets the environment to use it.
class Tune : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "muster_tuning_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    ::setenv("XDG_CACHE_HOME", folder_.c_str(), 1);
    ::unsetenv("MUSTER_ALGO");
  }
  void TearDown() override {
    ::unsetenv("XDG_CACHE_HOME");
    ::unsetenv("MUSTER_ALGO");
    std::filesystem::remove_all(folder_);
  }

  std::string folder_;
};

MachineCosts some_machine() {
  MachineCosts machine;
  machine.tcp = {.latency = 1.25e-5, .overhead = 3e-6, .bytes_per_second = 3.5e9};
  machine.memory = {
      .wait = 4e-7, .turn = 2e-6, .cached_bytes_per_second = 5e10, .bytes_per_second = 7e9, .measured = true};
  machine.cores = 7;
  machine.measured = true;
  return machine;
}

TEST_F(Tune, KeepsMeasurements) {
  EXPECT_FALSE(load_tuning()->machine.measured) << "nothing was measured yet";
  ASSERT_TRUE(save_machine(some_machine()));
  EXPECT_EQ(load_tuning()->machine, some_machine());
}

TEST_F(Tune, UsesDefaultsForAnInvalidRecord) {
  std::filesystem::create_directories(std::filesystem::path(machine_path()).parent_path());
  for (const char* text : {"", "{", "[]", "{\"tcp\": 3}", "{\"cores\": -1}"}) {
    std::ofstream(machine_path()) << text;
    const auto tuning = load_tuning();
    ASSERT_TRUE(tuning) << text;
    EXPECT_FALSE(tuning->machine.measured) << text;
  }
}

TEST_F(Tune, AcceptsARecordWithoutMemoryCosts) {
  MachineCosts old = some_machine();
  old.memory = {};
  ASSERT_TRUE(save_machine(old));
  std::ifstream file(machine_path());
  EXPECT_THAT(std::string(std::istreambuf_iterator<char>(file), {}), testing::Not(HasSubstr("memory")));
  const MachineCosts machine = load_tuning()->machine;
  EXPECT_EQ(machine, old);
  EXPECT_TRUE(machine.measured);
  EXPECT_FALSE(machine.memory.measured);
}

TEST_F(Tune, UsesDefaultsWithoutMemoryCosts) {
  Tuning tuning;
  tuning.machine = some_machine();
  const std::string good = tuning.encode();
  ASSERT_TRUE(Tuning::decode(good));
  for (const auto& [from, to] : {std::pair{"\"wait\":4e-07", "\"wait\":-1"}, {"\"turn\"", "\"trun\""}}) {
    std::string bad = good;
    ASSERT_NE(bad.find(from), std::string::npos) << bad;
    bad.replace(bad.find(from), std::string_view(from).size(), to);
    EXPECT_FALSE(Tuning::decode(bad)) << bad;
    std::filesystem::create_directories(std::filesystem::path(machine_path()).parent_path());
    std::ofstream(machine_path()) << bad;
    EXPECT_FALSE(load_tuning()->machine.measured);
  }
}

TEST_F(Tune, IsStoredBelowHomeWithoutACacheDirectory) {
  ::unsetenv("XDG_CACHE_HOME");
  ::setenv("HOME", folder_.c_str(), 1);
  EXPECT_THAT(machine_path(), testing::StartsWith(folder_ + "/.cache/muster/machine-"));
  ::unsetenv("HOME");
  EXPECT_EQ(machine_path(), "");
  EXPECT_FALSE(save_machine(some_machine()));
}

TEST_F(Tune, TakesTheAlgorithmsThatTheUserRequests) {
  ::setenv("MUSTER_ALGO", "all_reduce=ring,broadcast=chain", 1);
  const auto tuning = load_tuning();
  ASSERT_TRUE(tuning);
  CollectiveSpec spec{.collective = Collective::kAllReduce, .size = 4, .count = 1};
  tuning->apply(spec, "tcp", 2);
  EXPECT_STREQ(choose(spec)->name, "ring");
  spec.collective = Collective::kBroadcast;
  tuning->apply(spec, "tcp", 2);
  EXPECT_STREQ(choose(spec)->name, "chain");
  spec.collective = Collective::kAllGather;
  tuning->apply(spec, "tcp", 2);
  EXPECT_EQ(spec.algorithm, nullptr);
}

TEST_F(Tune, ListsTheValidNamesForAWrongOne) {
  EXPECT_THAT(
      parse_wanted("all_reduce=rnig").error().message,
      testing::AllOf(HasSubstr("'rnig'"), HasSubstr("recursive_doubling, halving_doubling, double_tree, ring")));
  EXPECT_THAT(parse_wanted("allreduce=ring").error().message, HasSubstr("names no collective"));
  EXPECT_THAT(parse_wanted("all_reduce").error().message, HasSubstr("ring"));
  EXPECT_THAT(parse_wanted("all_reduce=ring,,").error().message, HasSubstr("names no collective"));
  EXPECT_TRUE(parse_wanted(""));
  ::setenv("MUSTER_ALGO", "nonsense", 1);
  EXPECT_EQ(load_tuning().error().code, ErrorCode::kInvalidArgument);
}

TEST_F(Tune, IsSerializedBetweenRanks) {
  Tuning tuning;
  tuning.machine = some_machine();
  tuning.wanted = *parse_wanted("reduce=binomial,all_to_all=bruck");
  const auto there = Tuning::decode(tuning.encode());
  ASSERT_TRUE(there);
  EXPECT_EQ(there->machine, tuning.machine);
  EXPECT_EQ(there->wanted, tuning.wanted);
}

TEST_F(Tune, RefusesMalformedBytes) {
  Tuning tuning;
  const std::string good = tuning.encode();
  EXPECT_FALSE(Tuning::decode(""));
  EXPECT_FALSE(Tuning::decode(std::string(1 << 20, ' ')));
  EXPECT_FALSE(Tuning::decode("{\"algo\": \"\"}"));
  Random random(3);
  for (int i = 0; i < 2000; ++i) {
    std::string bad = good;
    for (uint64_t hits = random.below(4) + 1; hits > 0; --hits) {
      bad[random.below(bad.size())] = static_cast<char>(random.below(256));
    }
    const auto decoded = Tuning::decode(bad);  // must return, with or without a result
    EXPECT_TRUE(!decoded || decoded->machine.cores > 0);
  }
}

TEST_F(Tune, CountsRanksPerCore) {
  Tuning tuning;
  tuning.machine.cores = 2;
  CollectiveSpec spec;
  tuning.apply(spec, "unix", 8);
  EXPECT_EQ(spec.costs.load, 4);
  EXPECT_EQ(spec.costs.link.latency, tuning.machine.local.latency);
}

}  // namespace
}  // namespace muster::test
