#include "muster/launch/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr Machine kMachine{8, 0, 0};

Result<RunOptions> parse(const std::vector<std::string>& words, const Environment& environment = {},
                         const Machine& machine = kMachine) {
  return parse_run_options(words, environment, machine);
}

RunOptions parsed(const std::vector<std::string>& words, const Environment& environment = {},
                  const Machine& machine = kMachine) {
  const auto options = parse(words, environment, machine);
  EXPECT_TRUE(options) << options.error().message;
  return options.value_or(RunOptions{});
}

std::string refused(const std::vector<std::string>& words, const Environment& environment = {}) {
  const auto options = parse(words, environment);
  EXPECT_FALSE(options) << "nothing was refused";
  if (options) return "";
  EXPECT_EQ(options.error().code, ErrorCode::kInvalidArgument);
  return options.error().message;
}

TEST(RunOptions, AScriptAloneIsOneWorkerOnOneNode) {
  const auto options = parsed({"train.py"});
  EXPECT_EQ(options.nnodes_max, 1);
  EXPECT_EQ(options.nproc, 1);
  EXPECT_EQ(options.program, "train.py");
  EXPECT_EQ(options.target, RunOptions::Target::kScript);
  EXPECT_THAT(options.arguments, IsEmpty());
  EXPECT_EQ(options.master_port, 0);
  EXPECT_EQ(options.timeout, std::chrono::seconds(300));
}

TEST(RunOptions, DashesAndUnderscoresAreTheSame) {
  EXPECT_EQ(parsed({"--nproc_per_node", "4", "a.py"}).nproc, 4);
  EXPECT_EQ(parsed({"--nproc-per-node", "4", "a.py"}).nproc, 4);
  EXPECT_EQ(parsed({"--nproc_per_node=4", "a.py"}).nproc, 4);
  EXPECT_EQ(parsed({"--master_addr=my_host", "--nnodes=2", "a.py"}).master_addr, "my_host");
}

TEST(RunOptions, WhatFollowsTheScriptBelongsToIt) {
  const auto options = parsed({"--nproc-per-node=2", "a.py", "--nproc-per-node", "9", "-m", "--help", "--no_such"});
  EXPECT_EQ(options.nproc, 2);
  EXPECT_THAT(options.arguments, ElementsAre("--nproc-per-node", "9", "-m", "--help", "--no_such"));
  EXPECT_THAT(parsed({"--", "-odd-name.py", "x"}).arguments, ElementsAre("x"));
}

TEST(RunOptions, ModuleAndProgram) {
  EXPECT_EQ(parsed({"-m", "package.train", "--lr", "1"}).target, RunOptions::Target::kModule);
  EXPECT_EQ(parsed({"--module", "package.train"}).program, "package.train");
  EXPECT_EQ(parsed({"--no_python", "./digits"}).target, RunOptions::Target::kProgram);
  EXPECT_THAT(refused({"--no-python", "-m", "x"}), HasSubstr("exclude each other"));
}

TEST(RunOptions, WorkersByWhatTheMachineHas) {
  EXPECT_EQ(parsed({"--nproc-per-node=cpu", "a.py"}).nproc, 8);
  EXPECT_EQ(parsed({"--nproc-per-node=auto", "a.py"}).nproc, 8);
  EXPECT_EQ(parsed({"--nproc-per-node=auto", "a.py"}, {}, Machine{8, 3, 0}).nproc, 3);
  EXPECT_EQ(parsed({"--nproc-per-node=gpu", "a.py"}, {}, Machine{8, 3, 0}).nproc, 3);
  EXPECT_THAT(refused({"--nproc-per-node=gpu", "a.py"}), HasSubstr("no GPU"));
}

TEST(RunOptions, AnUnknownOptionIsNamed) {
  EXPECT_EQ(refused({"--no-such-thing", "a.py"}), "unknown option --no-such-thing");
  EXPECT_THAT(refused({"--nproc", "2", "a.py"}), HasSubstr("did you mean --nproc-per-node"));
  EXPECT_THAT(refused({"-x", "a.py"}), HasSubstr("-x"));
}

TEST(RunOptions, ABadValueNamesTheOptionAndWhatItTakes) {
  for (const std::string value : {"0", "-1", "two", "2x", " ", "99999999999", "1.5"}) {
    EXPECT_THAT(
        refused({"--nproc-per-node=" + value, "a.py"}),
        AllOf(HasSubstr("--nproc-per-node takes auto, cpu, gpu, xpu or a number"), HasSubstr("'" + value + "'")));
    EXPECT_THAT(refused({"--nnodes=" + value, "a.py"}), HasSubstr("--nnodes takes"));
  }
  EXPECT_THAT(refused({"--master-port=65536", "a.py"}), HasSubstr("--master-port takes a port"));
  EXPECT_THAT(refused({"--timeout=soon", "a.py"}), HasSubstr("--timeout takes a number of seconds, not 'soon'"));
  EXPECT_THAT(refused({"--timeout=nan", "a.py"}), HasSubstr("--timeout takes"));
  EXPECT_THAT(refused({"--standalone=maybe", "a.py"}), HasSubstr("--standalone takes no value, or true or false"));
  EXPECT_THAT(refused({"--nnodes=2", "--master-addr=h", "--node-rank=2", "a.py"}), HasSubstr("0 to 1"));
  EXPECT_THAT(refused({"--rdzv-backend=zoo", "a.py"}), HasSubstr("static, c10d, parallel, redis, etcd or file, not"));
}

TEST(RunOptions, AValueThatIsMissingIsNamed) {
  EXPECT_THAT(refused({"--nnodes"}), HasSubstr("--nnodes takes N|MIN:MAX, and nothing was given"));
  EXPECT_THAT(refused({"--nnodes=", "a.py"}), HasSubstr("--nnodes takes N|MIN:MAX, and nothing was given"));
  EXPECT_THAT(refused({"--nnodes", "", "a.py"}), HasSubstr("--nnodes takes N|MIN:MAX, and nothing was given"));
  EXPECT_THAT(refused({}), HasSubstr("no script was given"));
  EXPECT_THAT(refused({"--nproc-per-node", "2"}), HasSubstr("no script was given"));
  EXPECT_THAT(refused({"-m"}), HasSubstr("no module was given"));
  EXPECT_THAT(refused({"--no-python"}), HasSubstr("no program was given"));
}

TEST(RunOptions, ARangeOfNodesIsElastic) {
  const auto options = parsed({"--nnodes=2:4", "--master-addr=h", "a.py"});
  EXPECT_EQ(options.nnodes_min, 2);
  EXPECT_EQ(options.nnodes_max, 4);
  EXPECT_TRUE(options.elastic());
  EXPECT_FALSE(parsed({"--nnodes=2:2", "--master-addr=h", "a.py"}).elastic());
  EXPECT_EQ(parsed({"--nnodes=2:4", "--master-addr=h", "--node-rank=3", "a.py"}).node_rank, 3);
  for (const std::string value : {"4:2", "0:2", ":", "1:", ":2", "1:2:3", "1-2"})
    EXPECT_THAT(refused({"--nnodes=" + value, "--master-addr=h", "a.py"}),
                HasSubstr("--nnodes takes a number of nodes from 1 up, or MIN:MAX, not '" + value + "'"));
}

TEST(RunOptions, SeveralNodesNeedAMasterAndGetTheUsualPort) {
  EXPECT_THAT(refused({"--nnodes=2", "a.py"}), HasSubstr("needs --master-addr"));
  const auto options = parsed({"--nnodes=2", "--master-addr=node0", "a.py"});
  EXPECT_EQ(options.master_port, 29500);
  EXPECT_FALSE(options.node_rank);
  EXPECT_EQ(options.run_id, "none");
  EXPECT_THAT(refused({"--nnodes=2", "--standalone", "a.py"}), HasSubstr("--standalone is for one node"));
}

TEST(RunOptions, TheRendezvousEndpointIsTheMaster) {
  const auto options =
      parsed({"--nnodes=2", "--rdzv-endpoint=[::1]:4000", "--rdzv_backend=c10d", "--rdzv_id=j", "a.py"});
  EXPECT_EQ(options.master_addr, "::1");
  EXPECT_EQ(options.master_port, 4000);
  EXPECT_EQ(options.run_id, "j");
  EXPECT_EQ(parsed({"--nnodes=2", "--rdzv-endpoint=h", "a.py"}).master_port, 29500);
  EXPECT_THAT(refused({"--nnodes=2", "--rdzv-endpoint=h:port", "a.py"}), HasSubstr("--rdzv-endpoint takes"));
}

TEST(RunOptions, TorchrunsVariablesStandForOptionsThatAreNotGiven) {
  const Environment environment = {{"PET_NPROC_PER_NODE", "3"}, {"PET_MASTER_PORT", "1234"}};
  EXPECT_EQ(parsed({"a.py"}, environment).nproc, 3);
  EXPECT_EQ(parsed({"a.py"}, environment).master_port, 1234);
  EXPECT_EQ(parsed({"--nproc_per_node", "2", "a.py"}, environment).nproc, 2);
  EXPECT_THAT(refused({"a.py"}, {{"PET_NNODES", "many"}}), HasSubstr("--nnodes takes"));
}

TEST(RunOptions, TheSecretComesFromTheVariableOrAFile) {
  EXPECT_EQ(parsed({"a.py"}, {{"MUSTER_SECRET", "00ff"}}).secret, (Bytes{0x00, 0xff}));
  EXPECT_THAT(refused({"a.py"}, {{"MUSTER_SECRET", "xyz"}}), HasSubstr("MUSTER_SECRET takes the job's secret in hex"));
  EXPECT_THAT(refused({"--secret-file=/no/such/file", "a.py"}), HasSubstr("cannot be read"));
  std::string path = ::testing::TempDir() + "secret-XXXXXX";
  ::close(::mkstemp(path.data()));
  EXPECT_THAT(refused({"--secret-file=" + path, "a.py"}), HasSubstr("empty"));
  std::ofstream(path) << "0a0b\n";
  EXPECT_EQ(parsed({"--secret-file=" + path, "a.py"}, {{"MUSTER_SECRET", "ff"}}).secret, (Bytes{0x0a, 0x0b}));
  std::remove(path.c_str());
}

TEST(RunOptions, HelpNamesEveryOption) {
  EXPECT_TRUE(parsed({"--help"}).help);
  EXPECT_TRUE(parsed({"-h", "a.py"}).help);
  for (const std::string option :
       {"--nnodes", "--nproc-per-node", "--node-rank", "--standalone", "--module", "--interface"})
    EXPECT_THAT(run_help(), HasSubstr(option));
}

}  // namespace
}  // namespace muster
