#include "muster/launch/workers/worker_environment.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

RunOptions options() {
  RunOptions options;
  options.max_restarts = 5;
  options.run_id = "run";
  options.role = "trainer";
  return options;
}

JobEnvironment job() {
  JobEnvironment job;
  job.placement = {1, 3, 4, 2, 9, 1, 6};
  job.generation = 3;
  job.restart_count = 2;
  job.store_url = "unix:@name";
  job.torch_port = 4321;
  job.node0_addr = "10.0.0.1";
  job.secret = {0xab, 0xcd};
  job.cpus = 10;
  return job;
}

TEST(WorkerEnvironment, HasTorchrunsVariables) {
  const Environment env = worker_environment(options(), job(), 3, {});
  EXPECT_EQ(env.at("RANK"), "5");
  EXPECT_EQ(env.at("LOCAL_RANK"), "3");
  EXPECT_EQ(env.at("GROUP_RANK"), "1");
  EXPECT_EQ(env.at("ROLE_RANK"), "4");
  EXPECT_EQ(env.at("ROLE_NAME"), "trainer");
  EXPECT_EQ(env.at("LOCAL_WORLD_SIZE"), "4");
  EXPECT_EQ(env.at("WORLD_SIZE"), "9");
  EXPECT_EQ(env.at("ROLE_WORLD_SIZE"), "6");
  EXPECT_EQ(env.at("GROUP_WORLD_SIZE"), "3");
  EXPECT_EQ(env.at("MASTER_ADDR"), "127.0.0.1");
  EXPECT_EQ(env.at("MASTER_PORT"), "4321");
  EXPECT_EQ(env.at("TORCHELASTIC_RESTART_COUNT"), "2");
  EXPECT_EQ(env.at("TORCHELASTIC_MAX_RESTARTS"), "5");
  EXPECT_EQ(env.at("TORCHELASTIC_RUN_ID"), "run");
  EXPECT_EQ(env.at("TORCHELASTIC_USE_AGENT_STORE"), "True");
}

TEST(WorkerEnvironment, HasTheStoreUrlAndSecret) {
  const Environment env = worker_environment(options(), job(), 0, {});
  EXPECT_EQ(env.at("MUSTER_STORE"), "unix:@name");
  EXPECT_EQ(env.at("MUSTER_SECRET"), "abcd");
  EXPECT_EQ(env.at("MUSTER_GENERATION"), "3");
  EXPECT_EQ(env.at("MUSTER_RUN_ID"), "run");
  EXPECT_EQ(env.count("MUSTER_INTERFACE"), 0U);
  JobEnvironment bound = job();
  bound.interface = "eth0";
  EXPECT_EQ(worker_environment(options(), bound, 0, {}).at("MUSTER_INTERFACE"), "eth0");
}

TEST(WorkerEnvironment, MasterAddrIsReachableOnRequest) {
  RunOptions several = options();
  several.nnodes_max = 3;
  several.master_port = 29400;
  EXPECT_EQ(worker_environment(several, job(), 0, {}).at("MUSTER_NODE0_ADDR"), "10.0.0.1");
  EXPECT_EQ(worker_environment(several, job(), 0, {}).at("MASTER_ADDR"), "127.0.0.1");
  EXPECT_EQ(
      worker_environment(several, job(), 0, {{"MUSTER_TCPSTORE_REDIRECT", "outer"}}).count("MUSTER_TCPSTORE_REDIRECT"),
      0U);
  several.reachable_master_addr = true;
  const Environment env = worker_environment(several, job(), 0, {});
  EXPECT_EQ(env.at("MASTER_ADDR"), "10.0.0.1");
  EXPECT_EQ(env.at("MASTER_PORT"), "29400");
  EXPECT_EQ(env.at("MUSTER_TCPSTORE_REDIRECT"), "10.0.0.1:29400=127.0.0.1:4321");
  several.master_port = 0;
  EXPECT_EQ(worker_environment(several, job(), 0, {}).at("MASTER_PORT"), "29500");
  several.nnodes_max = 1;
  EXPECT_EQ(worker_environment(several, job(), 0, {}).at("MASTER_ADDR"), "127.0.0.1");
}

TEST(WorkerEnvironment, ReplacesVariablesOfAnOuterJob) {
  const Environment env =
      worker_environment(options(), job(), 0, {{"RANK", "77"}, {"MASTER_ADDR", "elsewhere"}, {"HOME", "/h"}});
  EXPECT_EQ(env.at("RANK"), "2");
  EXPECT_EQ(env.at("MASTER_ADDR"), "127.0.0.1");
  EXPECT_EQ(env.at("HOME"), "/h");
}

TEST(WorkerEnvironment, DividesTheCpusByDefault) {
  EXPECT_EQ(worker_environment(options(), job(), 0, {}).at("OMP_NUM_THREADS"), "2");
  EXPECT_EQ(worker_environment(options(), job(), 0, {{"OMP_NUM_THREADS", "7"}}).at("OMP_NUM_THREADS"), "7");
  JobEnvironment crowded = job();
  crowded.cpus = 1;
  EXPECT_EQ(worker_environment(options(), crowded, 0, {}).at("OMP_NUM_THREADS"), "1");
}

TEST(WorkerEnvironment, PythonIsUnbufferedByDefault) {
  EXPECT_EQ(worker_environment(options(), job(), 0, {}).at("PYTHONUNBUFFERED"), "1");
  EXPECT_EQ(worker_environment(options(), job(), 0, {{"PYTHONUNBUFFERED", ""}}).at("PYTHONUNBUFFERED"), "");
}

TEST(WorkerEnvironment, VirtualLocalRankIsZeroWithOneDevice) {
  RunOptions virtually = options();
  virtually.virtual_local_rank = true;
  const Environment env = worker_environment(virtually, job(), 2, {});
  EXPECT_EQ(env.at("LOCAL_RANK"), "0");
  EXPECT_EQ(env.at("RANK"), "4");
  EXPECT_EQ(env.at("CUDA_VISIBLE_DEVICES"), "2");
  EXPECT_EQ(env.at("ASCEND_RT_VISIBLE_DEVICES"), "2");
  const Environment narrowed = {{"CUDA_VISIBLE_DEVICES", "7,GPU-abc"}};
  EXPECT_EQ(worker_environment(virtually, job(), 1, narrowed).at("CUDA_VISIBLE_DEVICES"), "GPU-abc");
  EXPECT_EQ(worker_environment(virtually, job(), 2, narrowed).at("CUDA_VISIBLE_DEVICES"), "");
  EXPECT_EQ(worker_environment(options(), job(), 1, narrowed).at("CUDA_VISIBLE_DEVICES"), "7,GPU-abc");
}

}  // namespace
}  // namespace muster
