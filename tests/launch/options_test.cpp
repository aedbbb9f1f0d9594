#include "muster/launch/options/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cctype>
#include <csignal>
#include <cstdio>
#include <fstream>

#include "muster/launch/options/option_table.h"
#include "muster/launch/options/parse_context.h"

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

TEST(RunOptions, DefaultsAreOneWorkerOnOneNode) {
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

TEST(RunOptions, ArgumentsAfterTheScriptBelongToIt) {
  const auto options = parsed({"--nproc-per-node=2", "a.py", "--nproc-per-node", "9", "-m", "--help", "--no_such"});
  EXPECT_EQ(options.nproc, 2);
  EXPECT_THAT(options.arguments, ElementsAre("--nproc-per-node", "9", "-m", "--help", "--no_such"));
  EXPECT_THAT(parsed({"--", "-odd-name.py", "x"}).arguments, ElementsAre("x"));
}

TEST(RunOptions, ModuleAndProgram) {
  EXPECT_EQ(parsed({"-m", "package.train", "--lr", "1"}).target, RunOptions::Target::kModule);
  EXPECT_EQ(parsed({"--module", "package.train"}).program, "package.train");
  EXPECT_EQ(parsed({"--no_python", "./digits"}).target, RunOptions::Target::kProgram);
  EXPECT_THAT(refused({"--no-python", "-m", "x"}), HasSubstr("--module and --no-python exclude each other"));
  EXPECT_THAT(refused({"-c", "-m", "x"}), HasSubstr("--module and --code exclude each other"));
}

TEST(RunOptions, WorkersFollowTheMachinesDevices) {
  EXPECT_EQ(parsed({"--nproc-per-node=cpu", "a.py"}).nproc, 8);
  EXPECT_EQ(parsed({"--nproc-per-node=auto", "a.py"}).nproc, 8);
  EXPECT_EQ(parsed({"--nproc-per-node=auto", "a.py"}, {}, Machine{8, 3, 0}).nproc, 3);
  EXPECT_EQ(parsed({"--nproc-per-node=gpu", "a.py"}, {}, Machine{8, 3, 0}).nproc, 3);
  EXPECT_EQ(parsed({"--nproc-per-node=auto", "a.py"}, {}, Machine{.cpus = 8, .npus = 4}).nproc, 4);
  EXPECT_EQ(parsed({"--nproc-per-node=npu", "a.py"}, {}, Machine{.cpus = 8, .npus = 4}).nproc, 4);
  EXPECT_THAT(refused({"--nproc-per-node=gpu", "a.py"}), HasSubstr("no GPU"));
  EXPECT_THAT(refused({"--nproc-per-node=npu", "a.py"}), HasSubstr("no NPU"));
  for (const std::string word : {"gpu", "xpu", "npu", "auto"})  // this machine may differ from the hosts
    EXPECT_EQ(parsed({"--hosts=a,b", "--nproc-per-node=" + word, "a.py"}).hosts.size(), 2U);
  EXPECT_THAT(refused({"--hosts=a,b", "--nproc-per-node=gpus", "a.py"}), HasSubstr("not 'gpus'"));
}

TEST(RunOptions, AnUnknownOptionIsNamed) {
  EXPECT_EQ(refused({"--no-such-thing", "a.py"}), "unknown option --no-such-thing");
  EXPECT_THAT(refused({"--nproc", "2", "a.py"}), HasSubstr("did you mean --nproc-per-node"));
  EXPECT_THAT(refused({"-x", "a.py"}), HasSubstr("-x"));
}

TEST(RunOptions, ABadValueNamesTheOptionAndItsValidValues) {
  for (const std::string value : {"0", "-1", "two", "2x", " ", "99999999999", "1.5"}) {
    EXPECT_THAT(
        refused({"--nproc-per-node=" + value, "a.py"}),
        AllOf(HasSubstr("--nproc-per-node takes auto, cpu, gpu, xpu, npu or a number"), HasSubstr("'" + value + "'")));
    EXPECT_THAT(refused({"--nnodes=" + value, "a.py"}), HasSubstr("--nnodes takes"));
  }
  EXPECT_THAT(refused({"--master-port=65536", "a.py"}), HasSubstr("--master-port takes a port"));
  EXPECT_THAT(refused({"--timeout=soon", "a.py"}), HasSubstr("--timeout takes a number of seconds, not 'soon'"));
  EXPECT_THAT(refused({"--timeout=nan", "a.py"}), HasSubstr("--timeout takes"));
  EXPECT_THAT(refused({"--standalone=maybe", "a.py"}), HasSubstr("--standalone takes no value, true or false"));
  EXPECT_THAT(refused({"--nnodes=2", "--master-addr=h", "--node-rank=2", "a.py"}), HasSubstr("0 to 1"));
  EXPECT_THAT(refused({"--rdzv-backend=zoo", "a.py"}), HasSubstr("static, c10d, parallel, redis, etcd or file, not"));
}

TEST(RunOptions, AValueThatIsMissingIsNamed) {
  EXPECT_THAT(refused({"--nnodes"}), HasSubstr("--nnodes takes N|MIN:MAX, but no value was given"));
  EXPECT_THAT(refused({"--nnodes=", "a.py"}), HasSubstr("--nnodes takes N|MIN:MAX, but no value was given"));
  EXPECT_THAT(refused({"--nnodes", "", "a.py"}), HasSubstr("--nnodes takes N|MIN:MAX, but no value was given"));
  EXPECT_THAT(refused({}), HasSubstr("no script was given"));
  EXPECT_THAT(refused({"--nproc-per-node", "2"}), HasSubstr("no script was given"));
  EXPECT_THAT(refused({"-m"}), HasSubstr("no module was given"));
  EXPECT_THAT(refused({"-c"}), HasSubstr("no code was given"));
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

TEST(RunOptions, EveryOptionHasItsVariable) {
  for (const auto& row : option_table()) {
    std::string variable = "PET_" + row.name().substr(2);
    for (char& c : variable) c = c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    const Environment environment = {{variable, row.flag == nullptr ? "7" : "1"}};
    const Machine machine;
    ParseContext context{environment, machine};
    const auto parsed = parse_args({"a.py"}, context);
    ASSERT_TRUE(parsed) << variable << ": " << parsed.error().message;
    if (row.flag == nullptr) {
      EXPECT_EQ(context.raw.*row.text, "7") << variable;
    } else {
      EXPECT_TRUE(context.raw.*row.flag) << variable;
    }
  }
}

TEST(RunOptions, AnOperatorsVariablesGiveAllOptions) {
  const Environment environment = {{"PET_NNODES", "3"},
                                   {"PET_NODE_RANK", "2"},
                                   {"PET_MASTER_ADDR", "job-master-0"},
                                   {"PET_MASTER_PORT", "23456"},
                                   {"PET_STANDALONE", "0"}};
  const auto options = parsed({"a.py"}, environment);
  EXPECT_EQ(options.nnodes_max, 3);
  EXPECT_EQ(options.node_rank, 2);
  EXPECT_EQ(options.master_addr, "job-master-0");
  EXPECT_EQ(options.master_port, 23456);
  EXPECT_EQ(parsed({"--node-rank=1", "a.py"}, environment).node_rank, 1);
}

TEST(RunOptions, TheSecretComesFromTheVariableOrAFile) {
  const std::string hex = "00ff" + std::string(28, '1'), other = "0a0b" + std::string(28, '2');
  EXPECT_EQ(parsed({"a.py"}, {{"MUSTER_SECRET", hex}}).secret, from_hex(hex).value());
  EXPECT_THAT(parsed({"a.py"}, {{"MUSTER_SECRET", ""}}).secret, testing::IsEmpty());
  EXPECT_THAT(refused({"a.py"}, {{"MUSTER_SECRET", "xyz"}}), HasSubstr("MUSTER_SECRET takes the job's secret in hex"));
  EXPECT_THAT(refused({"--secret-file=/no/such/file", "a.py"}), HasSubstr("cannot be read"));
  std::string path = ::testing::TempDir() + "secret-XXXXXX";
  ::close(::mkstemp(path.data()));
  EXPECT_THAT(refused({"--secret-file=" + path, "a.py"}), HasSubstr("empty"));
  std::ofstream(path) << other << "\n";
  EXPECT_EQ(parsed({"--secret-file=" + path, "a.py"}, {{"MUSTER_SECRET", "ff"}}).secret, from_hex(other).value());
  std::remove(path.c_str());
}

TEST(RunOptions, AWeakSecretIsRefused) {
  const std::string almost(30, 'a');
  EXPECT_THAT(refused({"a.py"}, {{"MUSTER_SECRET", almost}}), HasSubstr("MUSTER_SECRET: a secret of 15 bytes"));
  std::string path = ::testing::TempDir() + "secret-XXXXXX";
  ::close(::mkstemp(path.data()));
  std::ofstream(path) << almost;
  EXPECT_THAT(refused({"--secret-file=" + path, "a.py"}), HasSubstr("15 bytes can be guessed; it takes 16 or more"));
  std::remove(path.c_str());
}

TEST(RunOptions, ASecretFileMustBePrivate) {
  const std::string hex(64, 'a');
  std::string path = ::testing::TempDir() + "secret-XXXXXX";
  ::close(::mkstemp(path.data()));
  std::ofstream(path) << hex;
  for (const mode_t mode : {0640, 0604, 0620, 0644}) {
    ASSERT_EQ(::chmod(path.c_str(), mode), 0);
    EXPECT_THAT(refused({"--secret-file=" + path, "a.py"}), HasSubstr("other users can read or change"));
  }
  for (const mode_t mode : {0600, 0400}) {
    ASSERT_EQ(::chmod(path.c_str(), mode), 0);
    EXPECT_EQ(to_hex(parsed({"--secret-file=" + path, "a.py"}).secret), hex);
  }
  std::remove(path.c_str());
}

TEST(RunOptions, TorchrunCommandLinesAreAccepted) {
  const auto options =
      parsed({"--rdzv_backend=parallel", "--master_addr=10.0.0.1", "--master_port=29501", "--nnodes=2", "--node_rank",
              "1", "--nproc_per_node=8", "--enable_tiered_parallel_tcpstore=true", "ddp_test.py"});
  EXPECT_EQ(options.rdzv_backend, "parallel");
  EXPECT_EQ(options.master_addr, "10.0.0.1");
  EXPECT_EQ(options.master_port, 29501);
  EXPECT_EQ(options.node_rank, 1);
  EXPECT_EQ(options.nproc, 8);
  EXPECT_TRUE(options.tiered);
  EXPECT_EQ(options.program, "ddp_test.py");
}

TEST(RunOptions, ASwitchAcceptsABoolean) {
  const std::string name = "--enable-tiered-parallel-tcpstore";
  EXPECT_FALSE(parsed({"a.py"}).tiered);
  EXPECT_TRUE(parsed({name, "a.py"}).tiered);
  EXPECT_TRUE(parsed({name, "true", "a.py"}).tiered);
  EXPECT_EQ(parsed({name, "true", "a.py"}).program, "a.py");
  EXPECT_FALSE(parsed({name, "false", "a.py"}).tiered);
  EXPECT_FALSE(parsed({name + "=False", "a.py"}).tiered);
  EXPECT_TRUE(parsed({"a.py"}, {{"PET_ENABLE_TIERED_PARALLEL_TCPSTORE", "1"}}).tiered);
  EXPECT_FALSE(parsed({name + "=0", "a.py"}, {{"PET_ENABLE_TIERED_PARALLEL_TCPSTORE", "1"}}).tiered);
  EXPECT_THAT(refused({"a.py"}, {{"PET_STANDALONE", "maybe"}}), HasSubstr("PET_STANDALONE takes"));
}

TEST(RunOptions, AMisspeltOptionGetsASuggestion) {
  EXPECT_THAT(refused({"--nnode=2", "a.py"}), HasSubstr("did you mean --nnodes"));
  EXPECT_THAT(refused({"-np", "2", "a.py"}), HasSubstr("did you mean --nproc-per-node"));
  EXPECT_THAT(refused({"--max_restart=2", "a.py"}), HasSubstr("did you mean --max-restarts"));
  EXPECT_THAT(refused({"--rdzv-endpiont=h", "a.py"}), HasSubstr("did you mean --rdzv-endpoint"));
  EXPECT_EQ(refused({"-z", "a.py"}), "unknown option -z");
}

TEST(RunOptions, AnOptionThatIsGivenTwiceCountsTheLastTime) {
  EXPECT_EQ(parsed({"--nproc-per-node=2", "--nproc_per_node", "3", "a.py"}).nproc, 3);
}

TEST(RunOptions, ShortOptionsTakeTheirValueInAnyWay) {
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"-r", "3", "a.py"}, {"-r3", "a.py"}, {"-r=3", "a.py"}})
    EXPECT_EQ(parsed(words).redirects.of(5), kBothStreams);
  const auto options = parsed({"-t", "0:1,12:2", "a.py"});
  EXPECT_EQ(options.tee.of(0), kStdout);
  EXPECT_EQ(options.tee.of(12), kStderr);
  EXPECT_EQ(options.tee.of(1), kNoStream);
  for (const std::string value : {"4", "-1", "x", "0:4", "0:", ":1", "0:1;1:2", ","})
    EXPECT_THAT(refused({"-r", value, "a.py"}), AllOf(HasSubstr("--redirects takes"), HasSubstr("'" + value + "'")));
}

TEST(RunOptions, ALogDirectoryTeesAllStreams) {
  EXPECT_EQ(parsed({"--log-dir=logs", "a.py"}).tee.of(3), kBothStreams);
  EXPECT_EQ(parsed({"--log-dir=logs", "-r=1", "a.py"}).tee.of(3), kNoStream);
}

TEST(RunOptions, FiltersAreLists) {
  const auto options = parsed({"--local-ranks-filter=0,2", "--duplicate-stdout-filters", "loss,a,,b", "a.py"});
  EXPECT_THAT(options.local_ranks_filter, ElementsAre(0, 2));
  EXPECT_THAT(options.stdout_filters, ElementsAre("loss", "a,b"));
  EXPECT_THAT(refused({"--local-ranks-filter=0,x", "a.py"}), HasSubstr("--local-ranks-filter takes local ranks"));
  EXPECT_THAT(refused({"--nproc-per-node=2", "--local-ranks-filter=2", "a.py"}),
              HasSubstr("--local-ranks-filter 2 matches no worker: --nproc-per-node 2 gives local ranks 0 to 1"));
}

TEST(RunOptions, SignalsAreNamed) {
  EXPECT_THAT(parsed({"--signals-to-handle=SIGUSR1,usr2", "a.py"}).signals,
              ElementsAre(SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2));
  EXPECT_TRUE(parsed({"a.py"}).ends_job(SIGHUP));
  EXPECT_FALSE(parsed({"a.py"}).ends_job(SIGUSR1));
  EXPECT_TRUE(parsed({"--signals-to-handle=SIGUSR1", "a.py"}).ends_job(SIGUSR1));
  for (const std::string value : {"SIGKILL", "SIGCHLD", "SIGNOTHING", "9"})
    EXPECT_THAT(refused({"--signals-to-handle=" + value, "a.py"}), HasSubstr("--signals-to-handle takes"));
}

TEST(RunOptions, TheRendezvousConfigurationIsPairs) {
  const auto options =
      parsed({"--rdzv-conf=join_timeout=7,last_call_timeout=2,read_timeout=3,is_host=true,"
              "heartbeat_timeout=4,keep_alive_interval=5",
              "a.py"});
  EXPECT_EQ(options.timeout, std::chrono::seconds(7));
  EXPECT_EQ(options.last_call_timeout, std::chrono::seconds(2));
  EXPECT_EQ(options.heartbeat_timeout, std::chrono::seconds(4));
  EXPECT_EQ(options.is_host, true);
  EXPECT_EQ(parsed({"--rdzv-conf=timeout=7", "--timeout=9", "a.py"}).timeout, std::chrono::seconds(9));
  EXPECT_THAT(refused({"--rdzv-conf=join_timeout", "a.py"}), HasSubstr("--rdzv-conf takes key=value"));
  EXPECT_THAT(refused({"--rdzv-conf=joint_timeout=3", "a.py"}), HasSubstr("not 'joint_timeout'"));
  EXPECT_THAT(refused({"--rdzv-conf=is_host=perhaps", "a.py"}), HasSubstr("is_host takes true or false"));
  EXPECT_THAT(refused({"--rdzv-conf=join_timeout=x", "a.py"}), HasSubstr("join_timeout takes a number of seconds"));
  EXPECT_THAT(refused({"--rdzv-conf=heartbeat_timeout=0", "a.py"}), HasSubstr("more than 0 seconds"));
}

TEST(RunOptions, TorchrunsOtherKeysHaveTheirMeaning) {
  EXPECT_EQ(parsed({"--rdzv-conf=keep_alive_interval=2,keep_alive_max_attempt=4", "a.py"}).heartbeat_timeout,
            std::chrono::seconds(8));
  EXPECT_EQ(parsed({"--rdzv-conf=keep_alive_interval=2", "a.py"}).heartbeat_timeout, std::chrono::seconds(6));
  EXPECT_THAT(refused({"--rdzv-conf=keep_alive_interval=1e8,keep_alive_max_attempt=1000", "a.py"}),
              HasSubstr("too long"));
  EXPECT_EQ(parsed({"--rdzv-conf=close_timeout=7", "a.py"}).close_timeout, std::chrono::seconds(7));
  const auto two = [](const std::string& conf) {
    return std::vector<std::string>{"--nnodes=2", "--master-addr=h", conf};
  };
  auto words = two("--rdzv-conf=rank=1");
  words.emplace_back("a.py");
  EXPECT_EQ(parsed(words).node_rank, 1);
  words.insert(words.begin(), "--node-rank=0");
  EXPECT_EQ(parsed(words).node_rank, 0);
  EXPECT_THAT(refused({"--rdzv-conf=rank=1", "a.py"}), HasSubstr("--rdzv-conf rank takes a number from 0 to 0"));
  EXPECT_EQ(parsed({"--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=/a/b", "--rdzv-conf=store_type=file", "a.py"})
                .rdzv_url,
            "file:///a/b");
}

TEST(RunOptions, TheKeysOfEtcdBecomeItsUrl) {
  const auto url = [](const std::string& endpoint, const std::string& conf) {
    return parsed({"--nnodes=2", "--rdzv-backend=etcd", "--rdzv-endpoint", endpoint, "--rdzv-conf=" + conf, "a.py"})
        .rdzv_url;
  };
  EXPECT_EQ(url("h:1", "etcd_prefix=/a b"), "etcd://h:1/a%20b");
  EXPECT_EQ(url("etcd://h:1/own", "etcd_prefix=other"), "etcd://h:1/own");
  EXPECT_EQ(url("h:1", "protocol=https,ca_cert=/ca,ssl_cert=/c,ssl_cert_key=/k&"),
            "etcds://h:1?ca=/ca&cert=/c&key=/k%26");
  EXPECT_EQ(url("etcds://h", "cacert=/ca"), "etcds://h?ca=/ca");
  EXPECT_EQ(parsed({"--nnodes=2", "--rdzv-endpoint=etcds://h", "a.py"}).rdzv_backend, "etcd");
  EXPECT_EQ(parsed({"--nnodes=2", "--rdzv-endpoint=rediss://h", "a.py"}).rdzv_backend, "redis");
  EXPECT_EQ(parsed({"--nnodes=2", "--rdzv-backend=redis", "--rdzv-endpoint=rediss://h", "a.py"}).rdzv_url,
            "rediss://h");
  EXPECT_EQ(parsed({"--nnodes=2", "--rdzv-backend=redis", "--rdzv-endpoint=h", "a.py"}).rdzv_url, "redis://h");
  EXPECT_THAT(refused({"--nnodes=2", "--rdzv-backend=etcd", "--rdzv-endpoint=h", "--rdzv-conf=cert=/c", "a.py"}),
              HasSubstr("protocol=https"));
}

TEST(RunOptions, ManyNodesHaveAMiddleTier) {
  const auto fanout = [](std::vector<std::string> words) {
    words.insert(words.end(), {"--master-addr=h", "a.py"});
    return parsed(words).store_fanout;
  };
  EXPECT_EQ(fanout({"--nnodes=1025", "--enable-tiered-parallel-tcpstore"}), 33) << "two tiers, alike in width";
  EXPECT_EQ(fanout({"--nnodes=1025"}), 0);
  EXPECT_EQ(fanout({"--nnodes=100", "--enable-tiered-parallel-tcpstore"}), 0);
  EXPECT_EQ(fanout({"--nnodes=1025", "--enable-tiered-parallel-tcpstore", "--store-fanout=0"}), 0);
  EXPECT_THAT(refused({"--store-fanout=some", "a.py"}), HasSubstr("--store-fanout takes auto or a number"));
  EXPECT_THAT(refused({"--store-fanout=4", "--nnodes=8", "--master-addr=h", "a.py"}),
              HasSubstr("--store-fanout 4 needs --enable-tiered-parallel-tcpstore"));
  EXPECT_EQ(fanout({"--nnodes=8", "--store-fanout=0"}), 0);
}

TEST(RunOptions, OptionsWithoutEffectAreReported) {
  EXPECT_THAT(parsed({"a.py"}).notices, IsEmpty());
  EXPECT_THAT(parsed({"--monitor-interval=5", "a.py"}).notices,
              ElementsAre(HasSubstr("--monitor-interval has no effect")));
  EXPECT_THAT(parsed({"--standalone", "--rdzv-conf=store_type=file", "a.py"}).notices,
              ElementsAre(HasSubstr("store_type has no effect: a job of one node has no rendezvous")));
  EXPECT_THAT(parsed({"--rdzv-conf=read_timeout=3,etcd_prefix=x", "a.py"}).notices,
              ElementsAre(HasSubstr("etcd_prefix has no effect: it is for --rdzv-backend etcd"),
                          HasSubstr("read_timeout has no effect")));
}

TEST(RunOptions, AnotherServerMayHoldTheRendezvous) {
  for (const auto& [backend, endpoint, url] :
       std::vector<std::array<std::string, 3>>{{"redis", "h:6379", "redis://h:6379"},
                                               {"static", "redis://h:1/2", "redis://h:1/2"},
                                               {"etcd", "etcd://h", "etcd://h"},
                                               {"etcd-v2", "h:2379", "etcd://h:2379"},
                                               {"static", "file:///a/b", "file:///a/b"}}) {
    const auto options = parsed({"--nnodes=2", "--rdzv-backend", backend, "--rdzv-endpoint", endpoint, "a.py"});
    EXPECT_EQ(options.rdzv_url, url);
    EXPECT_EQ(options.rdzv_backend, url.substr(0, url.find(':')));
    EXPECT_EQ(options.master_addr, "");
  }
  EXPECT_EQ(parsed({"--nnodes=2", "--rdzv-endpoint=tcp://h:4", "a.py"}).master_port, 4);
  EXPECT_THAT(refused({"--rdzv-backend=redis", "a.py"}), HasSubstr("needs --rdzv-endpoint redis://"));
  EXPECT_THAT(refused({"--rdzv-backend=redis", "--rdzv-endpoint=etcd://h", "a.py"}),
              HasSubstr("needs --rdzv-endpoint"));
  EXPECT_THAT(refused({"--rdzv-backend=c10d", "--rdzv-endpoint=redis://h", "a.py"}), HasSubstr("contradict"));
  EXPECT_THAT(refused({"--nnodes=2", "--rdzv-endpoint=gopher://h", "a.py"}), HasSubstr("--rdzv-endpoint takes"));
}

TEST(RunOptions, TheUsersRootOverridesTheOperators) {
  const Environment environment = {{"PET_RDZV_ENDPOINT", "operator:1"}, {"PET_MASTER_PORT", "2"}};
  EXPECT_EQ(parsed({"--nnodes=2", "--master-addr=user", "a.py"}, environment).master_addr, "user");
  EXPECT_EQ(parsed({"--nnodes=2", "--rdzv-endpoint=user:3", "a.py"}, environment).master_port, 3);
  EXPECT_EQ(parsed({"--nnodes=2", "a.py"}, environment).master_addr, "operator");
}

TEST(RunOptions, StartMethodIsParsed) {
  EXPECT_EQ(parsed({"a.py"}).start_method, std::nullopt);
  EXPECT_EQ(parsed({"--start-method=spawn", "a.py"}).start_method, StartMethod::kSpawn);
  EXPECT_EQ(parsed({"--start-method=forkserver", "a.py"}).start_method, StartMethod::kZygote);
  EXPECT_THAT(refused({"--start-method=thread", "a.py"}), HasSubstr("--start-method takes zygote or spawn"));
  EXPECT_THAT(parsed({"--preload=numpy,torchvision", "a.py"}).preload, ElementsAre("numpy", "torchvision"));
  EXPECT_FALSE(parsed({"--no-warm", "a.py"}).warm);
  EXPECT_EQ(parsed({"--numa-binding=core-complex", "a.py"}).numa_binding, NumaBinding::kCoreComplex);
  EXPECT_THAT(refused({"--numa-binding=near", "a.py"}), HasSubstr("--numa-binding takes node, socket"));
  EXPECT_THAT(refused({"--logs-specs=mine", "a.py"}), HasSubstr("--logs-specs takes default"));
  EXPECT_EQ(parsed({"--run-path", "--no-python", "/a.py"}).target, RunOptions::Target::kRunPath);
}

TEST(RunOptions, ShutdownTimeoutsAreParsed) {
  EXPECT_EQ(parsed({"a.py"}).shutdown_timeout, std::chrono::seconds(30)) << "as with torchrun";
  EXPECT_EQ(parsed({"a.py"}, {{"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "9"}}).shutdown_timeout, std::chrono::seconds(9));
  EXPECT_EQ(parsed({"--shutdown-timeout=1.5", "a.py"}).shutdown_timeout, std::chrono::milliseconds(1500));
  EXPECT_EQ(parsed({"--max-restarts=3", "a.py"}).max_restarts, 3);
  EXPECT_EQ(parsed({"a.py"}).restart_delay, std::chrono::seconds(30));
  EXPECT_EQ(parsed({"--restart-delay=0", "a.py"}).restart_delay, std::chrono::seconds(0));
  EXPECT_THAT(refused({"--monitor-interval=often", "a.py"}), HasSubstr("--monitor-interval takes"));
  EXPECT_THAT(refused({"--max-restarts=-1", "a.py"}), HasSubstr("--max-restarts takes a number from 0 up"));
}

class Hosts : public ::testing::Test {
 protected:
  Hosts() { ::close(::mkstemp(path_.data())); }
  ~Hosts() override { std::remove(path_.c_str()); }
  std::vector<std::string> file(const std::string& text) {
    std::ofstream(path_) << text;
    return {"--hostfile", path_, "a.py"};
  }
  std::string path_ = ::testing::TempDir() + "hosts-XXXXXX";
};

TEST_F(Hosts, RefuseAnInvalidEntry) {
  EXPECT_THAT(refused({"--hosts=a,b:0", "a.py"}), HasSubstr("not 'b:0'"));
  EXPECT_THAT(refused(file("a slots=4 max_slots=8\n")), HasSubstr("takes slots=N, not 'slots=4 max_slots=8'"));
}

TEST_F(Hosts, AreTheNodesInOrder) {
  const auto options = parsed({"--hosts=a,b:4,[::1]:2", "a.py"});
  ASSERT_EQ(options.hosts.size(), 3U);
  EXPECT_EQ(options.hosts[1].host, "b");
  EXPECT_EQ(options.hosts[1].nproc, 4);
  EXPECT_EQ(options.hosts[2].host, "::1");
  EXPECT_EQ(options.nnodes_max, 3);
  EXPECT_EQ(options.master_addr, "a");
  EXPECT_EQ(parsed({"--hosts=a", "a.py"}, {{"MUSTER_SSH", "ssh -p 2222"}}).ssh, "ssh -p 2222");
  EXPECT_EQ(parsed({"--ssh=rsh", "--hosts=a", "a.py"}, {{"MUSTER_SSH", "ssh -p 2222"}}).ssh, "rsh");
}

TEST_F(Hosts, ComeFromAFileToo) {
  const auto options = parsed(file("# ours\n a slots=8 \n\nb # the other\nc:2\n"));
  ASSERT_EQ(options.hosts.size(), 3U);
  EXPECT_EQ(options.hosts[0].nproc, 8);
  EXPECT_EQ(options.hosts[1].nproc, 0);
  EXPECT_EQ(options.hosts[2].nproc, 2);
}

TEST_F(Hosts, RefuseInvalidLists) {
  EXPECT_THAT(refused(file("a slots=0\n")), HasSubstr("takes slots=N, not 'slots=0'"));
  EXPECT_THAT(refused(file("# no hosts\n")), HasSubstr("no host is listed"));
  EXPECT_THAT(refused({"--hostfile=/no/such", "a.py"}), HasSubstr("cannot be read"));
  EXPECT_THAT(refused({"--hosts=-oProxyCommand=x", "a.py"}), HasSubstr("--hosts takes names or addresses"));
  EXPECT_THAT(refused({"--hosts=a:x", "a.py"}), HasSubstr("--hosts takes names or addresses"));
  EXPECT_THAT(refused({"--hosts=a,b", "--nnodes=3", "a.py"}), HasSubstr("--nnodes 3 and 2 hosts"));
  EXPECT_THAT(refused({"--hosts=a,b", "--node-rank=1", "a.py"}), HasSubstr("do not give --node-rank"));
  EXPECT_THAT(refused({"--hosts=a,b", "--standalone", "a.py"}), HasSubstr("--standalone and --hosts"));
}

TEST(RunOptions, HelpNamesEveryOption) {
  EXPECT_TRUE(parsed({"--help"}).help);
  EXPECT_TRUE(parsed({"-h", "a.py"}).help);
  for (const auto& row : option_table())
    EXPECT_EQ(run_help().find(row.name()) == std::string::npos, std::string(row.group).empty()) << row.name();
}

}  // namespace
}  // namespace muster
