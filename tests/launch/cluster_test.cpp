#include "muster/launch/options/cluster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<std::string> expanded(const std::string& list) {
  auto hosts = expand_nodelist(list);
  EXPECT_TRUE(hosts) << hosts.error().message;
  return hosts.value_or(std::vector<std::string>{});
}

TEST(Nodelist, RangesAreWrittenOut) {
  EXPECT_THAT(expanded("n[1-3,7],gpu[08-10],login"),
              ElementsAre("n1", "n2", "n3", "n7", "gpu08", "gpu09", "gpu10", "login"));
  EXPECT_THAT(expanded("rack[1-2]n[03-04]-ib"),
              ElementsAre("rack1n03-ib", "rack1n04-ib", "rack2n03-ib", "rack2n04-ib"));
  EXPECT_THAT(expanded("n[099-101]"), ElementsAre("n099", "n100", "n101"));
}

TEST(Nodelist, SomethingElseIsRefused) {
  for (const std::string list : {"", "n[1-3", "n[3-1]", "n[a-b]", "n[]", ",n1", "n1,,n2", "n[1,,2]", "n[-1]",
                                 "n[0-4000000000]", "a[0-9999]b[0-9999]", "n[99999999999]"})
    EXPECT_FALSE(expand_nodelist(list)) << list;
}

std::vector<std::string> found(const Environment& environment) {
  const auto cluster = find_cluster(environment);
  EXPECT_TRUE(cluster) << cluster.error().message;
  return cluster && *cluster ? (*cluster)->options() : std::vector<std::string>{};
}

std::string cluster_refused(const Environment& environment) {
  const auto cluster = find_cluster(environment);
  EXPECT_FALSE(cluster);
  return cluster ? "" : cluster.error().message;
}

const Environment kStep = {{"SLURM_JOB_ID", "12345"},         {"SLURM_STEP_ID", "2"},
                           {"SLURM_STEP_NODELIST", "n[3-6]"}, {"SLURM_STEP_NUM_NODES", "4"},
                           {"SLURM_STEP_NUM_TASKS", "4"},     {"SLURM_NODEID", "1"}};

TEST(Clusters, WithoutAClusterGiveNoOptions) { EXPECT_THAT(found({{"PATH", "/bin"}, {"RANK", "3"}}), IsEmpty()); }

TEST(Clusters, ASlurmStepGivesAllOptions) {
  EXPECT_THAT(found(kStep), ElementsAre("--nnodes=4", "--node-rank=1", "--master-addr=n3", "--master-port=22347",
                                        "--rdzv-id=slurm-12345.2"));
}

TEST(Clusters, ABatchScriptRunsOnOneNode) {
  EXPECT_THAT(found({{"SLURM_JOB_ID", "1"}, {"SLURM_JOB_NODELIST", "n[1-2]"}, {"SLURM_NNODES", "2"}}), IsEmpty());
}

TEST(Clusters, SeveralAgentsOnANodeAreRefusedWithTheRemedy) {
  Environment step = kStep;
  step["SLURM_STEP_NUM_TASKS"] = "32";
  EXPECT_THAT(cluster_refused(step),
              AllOf(HasSubstr("32 processes on 4 nodes"), HasSubstr("srun --ntasks-per-node=1")));
  EXPECT_THAT(cluster_refused(
                  {{"OMPI_COMM_WORLD_SIZE", "8"}, {"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}}),
              HasSubstr("ppr:1:node"));
}

TEST(Clusters, ABrokenListIsRefused) {
  Environment step = kStep;
  step["SLURM_STEP_NODELIST"] = "n[3-";
  EXPECT_THAT(cluster_refused(step), HasSubstr("'n[3-'"));
}

TEST(Clusters, OpenMpiGivesTheRankAndTheSize) {
  const Environment ranks = {{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "1"}, {"PMIX_RANK", "1"}};
  EXPECT_THAT(found(ranks), ElementsAre("--nnodes=2", "--node-rank=1"));
  Environment with_master = ranks;
  with_master["MASTER_ADDR"] = "a";
  with_master["MASTER_PORT"] = "5";
  EXPECT_THAT(found(with_master), ElementsAre("--nnodes=2", "--node-rank=1", "--master-addr=a", "--master-port=5"));
  Environment in_slurm = ranks;
  in_slurm["SLURM_JOB_NODELIST"] = "n[7-8]";
  EXPECT_THAT(found(in_slurm), ElementsAre("--nnodes=2", "--node-rank=1", "--master-addr=n7"));
}

TEST(Clusters, OtherMpirunsGiveTheRankAndTheSize) {
  EXPECT_THAT(found({{"PMI_SIZE", "3"}, {"PMI_RANK", "2"}, {"MASTER_ADDR", "a"}}),
              ElementsAre("--nnodes=3", "--node-rank=2", "--master-addr=a"));
  EXPECT_THAT(found({{"PMIX_RANK", "2"}, {"MASTER_ADDR", "a"}}), ElementsAre("--node-rank=2", "--master-addr=a"));
}

TEST(Clusters, PmixUnderSlurmIsSlurm) {
  Environment step = kStep;
  step["PMIX_RANK"] = "1";
  EXPECT_EQ(found(step), found(kStep));
}

TEST(Clusters, APyTorchJobGivesAllOptions) {
  Environment pod = {{"KUBERNETES_SERVICE_HOST", "10.0.0.1"},
                     {"MASTER_ADDR", "job-master-0"},
                     {"MASTER_PORT", "23456"},
                     {"WORLD_SIZE", "3"},
                     {"RANK", "2"}};
  EXPECT_THAT(found(pod),
              ElementsAre("--nnodes=3", "--node-rank=2", "--master-addr=job-master-0", "--master-port=23456"));
  pod["MASTER_ADDR"] = "localhost";
  pod["HOSTNAME"] = "job-master-0";
  EXPECT_THAT(found(pod), ::testing::Contains("--master-addr=job-master-0"));
}

TEST(Clusters, APodWithoutAJobIsNoCluster) { EXPECT_THAT(found({{"KUBERNETES_SERVICE_HOST", "10.0.0.1"}}), IsEmpty()); }

TEST(Clusters, AJobSetsRootIsItsFirstPod) {
  EXPECT_THAT(found({{"KUBERNETES_SERVICE_HOST", "10.0.0.1"},
                     {"JOB_COMPLETION_INDEX", "3"},
                     {"JOBSET_NAME", "train"},
                     {"HOSTNAME", "train-workers-0-3"}}),
              ElementsAre("--node-rank=3", "--master-addr=train-workers-0-0.train"));
  EXPECT_THAT(found({{"KUBERNETES_SERVICE_HOST", "x"}, {"JOB_COMPLETION_INDEX", "3"}, {"MASTER_ADDR", "a.b"}}),
              ElementsAre("--node-rank=3", "--master-addr=a.b"));
}

TEST(Clusters, AWorkersOwnJobsAreNotTheClusters) {
  Environment worker = kStep;
  worker["MUSTER_RUN_ID"] = "outer";
  EXPECT_THAT(found(worker), IsEmpty());
}

RunOptions parsed_in(std::vector<std::string> words, const Environment& environment) {
  words.emplace_back("a.py");
  const auto options = parse_run_options(words, environment, Machine{});
  EXPECT_TRUE(options) << options.error().message;
  return options.value_or(RunOptions{});
}

TEST(Clusters, FillInMissingOptions) {
  const auto options = parsed_in({}, kStep);
  EXPECT_EQ(options.nnodes_max, 4);
  EXPECT_EQ(options.node_rank, 1);
  EXPECT_EQ(options.master_addr, "n3");
  EXPECT_THAT(options.cluster, HasSubstr("Slurm job 12345, step 2: --nnodes=4"));
  const auto named = parsed_in({"--rdzv-endpoint=other:7", "--nnodes=2:4"}, kStep);
  EXPECT_EQ(named.master_addr, "other");
  EXPECT_EQ(named.master_port, 7);
  EXPECT_EQ(named.nnodes_min, 2);
  EXPECT_EQ(named.node_rank, 1);
}

TEST(Clusters, AreIgnoredForAJobOfAnotherSize) {
  for (const char* word : {"--nnodes=1", "--standalone"}) {
    const auto options = parsed_in({word}, kStep);
    EXPECT_EQ(options.nnodes_max, 1);
    EXPECT_FALSE(options.node_rank);
    EXPECT_EQ(options.cluster, "");
  }
  EXPECT_EQ(parsed_in({}, {{"PET_NNODES", "1"}, {"SLURM_STEP_NODELIST", "n[1-2]"}}).nnodes_max, 1);
}

TEST(Clusters, WithoutANodeCountRequireNnodes) {
  const Environment pod = {{"KUBERNETES_SERVICE_HOST", "x"}, {"JOB_COMPLETION_INDEX", "1"}, {"MASTER_ADDR", "a"}};
  const auto options = parse_run_options({"a.py"}, pod, Machine{});
  ASSERT_FALSE(options);
  EXPECT_THAT(options.error().message, HasSubstr("give --nnodes"));
  EXPECT_EQ(parsed_in({"--nnodes=2"}, pod).node_rank, 1);
}

}  // namespace
}  // namespace muster
