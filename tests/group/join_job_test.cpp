// Processes that join a job from what the environment says, without a launcher.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "group/ranks.h"
#include "muster/io/fd.h"

namespace muster {
namespace {

/// A port of the loopback interface that is free now.
int unused_port() {
  const Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  EXPECT_EQ(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), length), 0);
  EXPECT_EQ(::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  return ntohs(address.sin_port);
}

void set_job(int rank, int size, int port, const char* host = "127.0.0.1") {
  ::setenv("RANK", std::to_string(rank).c_str(), 1);
  ::setenv("WORLD_SIZE", std::to_string(size).c_str(), 1);
  ::setenv("MASTER_ADDR", host, 1);
  ::setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
}

class JoinJob : public testing::Test {
 protected:
  JoinJob() {
    for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MUSTER_STORE", "MUSTER_GENERATION",
                             "TORCHELASTIC_USE_AGENT_STORE"}) {
      ::unsetenv(name);
    }
  }
};

/// Joins, adds up the ranks, and opens the store once more. Returns the exit status of the process.
int join_and_reduce(int size) {
  const auto group = Group::join_job();
  if (!group) return std::fprintf(stderr, "%s\n", group.error().to_string().c_str()), 2;
  int64_t sum = (*group)->membership().rank;
  if (!(*group)->all_reduce({&sum, 1, Dtype::kInt64}, ReduceOp::kSum).wait()) return 3;
  const auto store = Group::job_store();
  if (!store || !(*store)->add("visits", 1, Deadline::after(60s))) return 4;
  if (!(*group)->barrier().wait()) return 5;  // rank 0 serves the store until all have used it
  return sum == size * (size - 1) / 2 ? 0 : 6;
}

/// Runs a job in processes of its own.
void run_job(const char* host) {
  constexpr int kSize = 3;
  const int port = unused_port();
  std::vector<pid_t> children;
  for (int rank = 0; rank < kSize; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(120);
      set_job(rank, kSize, port, host);
      std::_Exit(join_and_reduce(kSize));
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  }
}

TEST_F(JoinJob, RankZeroServesTheStoreWithoutALauncher) { run_job("127.0.0.1"); }

TEST_F(JoinJob, MasterAddrMayBeAName) { run_job("localhost"); }

TEST_F(JoinJob, ErrorsNameTheVariable) {
  const auto message = [] {
    const auto group = Group::join_job();
    return group ? "joined" : group.error().message;
  };
  EXPECT_EQ(message(), "RANK is not set: start this program with `muster run`");
  ::setenv("RANK", "0", 1);
  ::setenv("WORLD_SIZE", "two", 1);
  EXPECT_EQ(message(), "WORLD_SIZE='two' is not a number");
  ::setenv("WORLD_SIZE", "1", 1);
  EXPECT_EQ(message(), "neither MUSTER_STORE nor MASTER_ADDR is set: start this program with `muster run`");
  set_job(0, 1, 70000);
  EXPECT_EQ(message(), "MASTER_PORT=70000 is not a port");
  ::setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
  EXPECT_NE(message().find("torchrun serves its own store"), std::string::npos) << message();
}

}  // namespace
}  // namespace muster
