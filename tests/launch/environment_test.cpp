#include "muster/launch/environment.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

JobEnvironment job() {
  JobEnvironment job;
  job.placement = {1, 3, 4, 2, 9};
  job.run_id = "run";
  job.role = "trainer";
  job.store_url = "unix:@name";
  job.torch_port = 4321;
  job.secret = {0xab, 0xcd};
  job.error_folder = "/errors";
  job.cpus = 10;
  return job;
}

TEST(WorkerEnvironment, HasTorchrunsVariables) {
  const Environment env = worker_environment(job(), 3, {});
  EXPECT_EQ(env.at("RANK"), "5");
  EXPECT_EQ(env.at("LOCAL_RANK"), "3");
  EXPECT_EQ(env.at("GROUP_RANK"), "1");
  EXPECT_EQ(env.at("ROLE_RANK"), "5");
  EXPECT_EQ(env.at("ROLE_NAME"), "trainer");
  EXPECT_EQ(env.at("LOCAL_WORLD_SIZE"), "4");
  EXPECT_EQ(env.at("WORLD_SIZE"), "9");
  EXPECT_EQ(env.at("ROLE_WORLD_SIZE"), "9");
  EXPECT_EQ(env.at("GROUP_WORLD_SIZE"), "3");
  EXPECT_EQ(env.at("MASTER_ADDR"), "127.0.0.1");
  EXPECT_EQ(env.at("MASTER_PORT"), "4321");
  EXPECT_EQ(env.at("TORCHELASTIC_RESTART_COUNT"), "0");
  EXPECT_EQ(env.at("TORCHELASTIC_MAX_RESTARTS"), "0");
  EXPECT_EQ(env.at("TORCHELASTIC_RUN_ID"), "run");
  EXPECT_EQ(env.at("TORCHELASTIC_USE_AGENT_STORE"), "True");
  EXPECT_EQ(env.at("TORCHELASTIC_ERROR_FILE"), "/errors/5.json");
}

TEST(WorkerEnvironment, SaysWhereTheStoreIsAndHowToProveOneself) {
  const Environment env = worker_environment(job(), 0, {});
  EXPECT_EQ(env.at("MUSTER_STORE"), "unix:@name");
  EXPECT_EQ(env.at("MUSTER_SECRET"), "abcd");
  EXPECT_EQ(env.at("MUSTER_GENERATION"), "0");
  EXPECT_EQ(env.at("MUSTER_RUN_ID"), "run");
  EXPECT_EQ(env.count("MUSTER_INTERFACE"), 0U);
  JobEnvironment bound = job();
  bound.interface = "eth0";
  EXPECT_EQ(worker_environment(bound, 0, {}).at("MUSTER_INTERFACE"), "eth0");
}

TEST(WorkerEnvironment, ReplacesAnOuterJobsVariablesAndKeepsTheRest) {
  const Environment env = worker_environment(job(), 0, {{"RANK", "77"}, {"MASTER_ADDR", "elsewhere"}, {"HOME", "/h"}});
  EXPECT_EQ(env.at("RANK"), "2");
  EXPECT_EQ(env.at("MASTER_ADDR"), "127.0.0.1");
  EXPECT_EQ(env.at("HOME"), "/h");
}

TEST(WorkerEnvironment, DividesTheCpusUnlessTheUserDid) {
  EXPECT_EQ(worker_environment(job(), 0, {}).at("OMP_NUM_THREADS"), "2");
  EXPECT_EQ(worker_environment(job(), 0, {{"OMP_NUM_THREADS", "7"}}).at("OMP_NUM_THREADS"), "7");
  JobEnvironment crowded = job();
  crowded.cpus = 1;
  EXPECT_EQ(worker_environment(crowded, 0, {}).at("OMP_NUM_THREADS"), "1");
}

TEST(WorkerEnvironment, PythonDoesNotBufferUnlessTheUserSaysSo) {
  EXPECT_EQ(worker_environment(job(), 0, {}).at("PYTHONUNBUFFERED"), "1");
  EXPECT_EQ(worker_environment(job(), 0, {{"PYTHONUNBUFFERED", ""}}).at("PYTHONUNBUFFERED"), "");
}

}  // namespace
}  // namespace muster
