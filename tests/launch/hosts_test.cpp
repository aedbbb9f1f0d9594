#include "muster/launch/agent/hosts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> command(std::vector<std::string> words, size_t node, const Environment& environment = {}) {
  const auto options = parse_run_options(words, environment, Machine{});
  EXPECT_TRUE(options) << options.error().message;
  return options ? host_command(*options, node, "bin/muster", "my work", environment) : std::vector<std::string>(3);
}

TEST(HostCommand, GivesTheNodeRankAndForwardsOtherOptions) {
  const auto words = command({"--hosts=a,b:4", "--ssh", "ssh -p 2222", "--master-port=7", "--rdzv-id=j", "--role=r",
                              "train.py", "--lr", "it's 1"},
                             1);
  EXPECT_THAT(words, ElementsAre("ssh", "-p", "2222", "b",
                                 "cd 'my work' && exec env bin/muster run --role=r --nnodes=2:2 "
                                 "--node-rank=1 --rdzv-id=j --master-addr=a --master-port=7 --nproc-per-node=4 "
                                 "--secret-file=- --until-stdin-ends -- train.py --lr 'it'\\''s 1'"));
}

TEST(HostCommand, CarriesTheEnvironmentOfAJobAndNoSecret) {
  const auto words = command({"--hosts=a", "train.py"}, 0,
                             {{"MUSTER_LOG", "info"},
                              {"ASCEND_LAUNCH_BLOCKING", "1"},
                              {"HCCL_IF_IP", "10.0.0.1"},
                              {"NCCL_DEBUG", "a b"},
                              {"MUSTER_SECRET", "abcdabcdabcdabcdabcdabcdabcdabcd"},
                              {"MUSTER_SSH", "rsh"},
                              {"NCCL_TOKEN", "1234"},
                              {"HOME", "/root"}});
  EXPECT_EQ(words.front(), "rsh");
  EXPECT_THAT(words.back(),
              HasSubstr("env ASCEND_LAUNCH_BLOCKING=1 HCCL_IF_IP=10.0.0.1 MUSTER_LOG=info 'NCCL_DEBUG=a b' bin"));
  for (const char* never : {"abcd", "1234", "HOME", "MUSTER_SSH"}) EXPECT_THAT(words.back(), Not(HasSubstr(never)));
}

TEST(HostCommand, SendsAStoresPasswordOverStandardInput) {
  const Environment environment = {{"MUSTER_STORE", "redis://:hidden2@there"}, {"MUSTER_LOG", "info"}};
  for (const char* url : {"redis://user:hidden@there:6379/1", "redis://:hidden@there"}) {
    const auto options =
        parse_run_options({"--hosts=a,b", "--rdzv-endpoint", url, "x.py"}, environment, Machine{}).value();
    const auto words = host_command(options, 1, "muster", "/", environment);
    EXPECT_THAT(words.back(), Not(HasSubstr("hidden")));
    EXPECT_THAT(words.back(), HasSubstr(" --rdzv-endpoint=- "));
    EXPECT_THAT(words.back(), HasSubstr("MUSTER_LOG=info"));
    EXPECT_EQ(host_input(options, Bytes{0xab}), std::string(url) + "\nab\n");
  }
  const auto options = parse_run_options({"--hosts=a", "--rdzv-endpoint=redis://there", "x.py"}, {}, Machine{}).value();
  EXPECT_THAT(host_command(options, 0, "muster", "/", {}).back(), HasSubstr(" --rdzv-endpoint=redis://there "));
  EXPECT_EQ(host_input(options, Bytes{0xab}), "ab\n");
}

TEST(HostCommand, ForwardsModuleAndProgramOptions) {
  EXPECT_THAT(command({"--hosts=a", "-m", "package.train"}, 0).back(), HasSubstr(" --module=true "));
  EXPECT_THAT(command({"--hosts=a", "--no-python", "./train"}, 0).back(), HasSubstr(" --no-python=true "));
}

TEST(HostCommand, JobsGetUniqueNamesAndPorts) {
  const auto one = command({"--hosts=a,b", "x.py"}, 0).back(), other = command({"--hosts=a,b", "x.py"}, 0).back();
  EXPECT_NE(one, other);
  EXPECT_THAT(one, HasSubstr("--master-addr=a --master-port=2"));
}

}  // namespace
}  // namespace muster
