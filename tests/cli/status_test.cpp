#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "muster/cli/commands.h"
#include "muster/io/fd.h"
#include "muster/launch/private_directories.h"
#include "muster/launch/rendezvous/rendezvous_messages.h"
#include "muster/store/server/server.h"
#include "muster/store/store.h"

namespace muster {
namespace {

using nlohmann::json;
constexpr Duration kTimeout = std::chrono::seconds(60);

// Status files of live agents, and the stores of their jobs.
class StatusCommand : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(::mkdtemp(directory_.data()), nullptr);
    ::setenv("XDG_RUNTIME_DIR", directory_.c_str(), 1);
    ASSERT_TRUE(user_directory({{"XDG_RUNTIME_DIR", directory_}}));
  }
  void TearDown() override {
    std::filesystem::remove_all(directory_);
    ::unsetenv("XDG_RUNTIME_DIR");
  }
  // Adds a job of one node. Its agent has the given PID in the given process domain.
  void add_job(const std::string& domain, int pid) {
    const std::string name = std::to_string(servers_.size());
    StoreServerOptions options;
    options.muster_listen = {Address::parse("unix:" + directory_ + "/store-" + name).value()};
    servers_.push_back(StoreServer::start(options, Deadline::after(kTimeout)).value());
    const std::string url = servers_.back()->muster_addresses().front().to_string();
    const auto store = open_store(url, {}, Deadline::after(kTimeout)).value();
    const json node = {{"host", "host"}, {"pid", pid},         {"process_domain", domain}, {"workers", 1},
                       {"node_rank", 0}, {"state", "running"}, {"heard_ago", 0.5}};
    const json job = {{"generation", 0}, {"restarts", 0}, {"progress", ""}, {"nodes", {node}}};
    ASSERT_TRUE(store->set(JobKeys("run").nodes(), to_bytes(job.dump()), Deadline::after(kTimeout)));
    const json status = {{"run_id", "run"}, {"pid", pid}, {"process_domain", domain}, {"store", url}, {"secret", ""}};
    const std::string path = directory_ + "/muster/job-" + name + ".json";
    std::ofstream(path) << status.dump();
    locks_.emplace_back(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    ASSERT_EQ(::flock(locks_.back().get(), LOCK_EX), 0);
  }
  static json shown() {
    testing::internal::CaptureStdout();
    EXPECT_EQ(status_command("muster", {"--json"}), 0);
    return json::parse(testing::internal::GetCapturedStdout());
  }

  std::string directory_ = "/tmp/muster-test-XXXXXX";
  std::vector<std::unique_ptr<StoreServer>> servers_;
  std::vector<Fd> locks_;
};

TEST_F(StatusCommand, ShowsAgentsOfOtherHostsWithTheSamePid) {
  add_job("boot-a/pid:1", 4711);
  add_job("boot-b/pid:1", 4711);
  EXPECT_EQ(shown().size(), 2u) << "two jobs of one name, on two machines whose home directory is shared";
}

TEST_F(StatusCommand, ShowsAJobOnceForAllItsAgents) {
  add_job("boot-a/pid:1", 4711);
  add_job("boot-a/pid:1", 4711);
  EXPECT_EQ(shown().size(), 1u);
}

}  // namespace
}  // namespace muster
