// Workers as processes that are killed and stopped.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "base/environment.h"
#include "muster/base/random.h"
#include "rpc/workers.h"

namespace muster::rpc::test {
namespace {

constexpr int kMaxServers = 24;
constexpr uint64_t kMaxCalls = 20'000;

/// Memory that all processes of a test share.
struct Counters {
  std::atomic<int> runs[kMaxCalls];
};

/// A process that serves calls. All of them are forked before the test starts threads, and begin to serve when the test
/// writes a byte.
class ServerProcess {
 public:
  ServerProcess(const std::string& store_path, const std::string& name, const std::string& transports,
                Counters& counters) {
    EXPECT_EQ(pipe(pipe_.data()), 0);
    pid_ = fork();
    if (pid_ == 0) serve(store_path, name, transports, counters);
    close(pipe_[0]);
  }
  ~ServerProcess() { end(); }
  ServerProcess(const ServerProcess&) = delete;

  void begin() const { EXPECT_EQ(write(pipe_[1], "x", 1), 1); }
  void signal(int number) const { kill(pid_, number); }
  /// Stops the process and waits until it has stopped.
  void stop() const {
    signal(SIGSTOP);
    waitpid(pid_, nullptr, WUNTRACED);
  }
  /// Kills the process and waits until it is gone.
  void end() {
    if (pid_ < 0) return;
    close(pipe_[1]);
    signal(SIGKILL);
    waitpid(std::exchange(pid_, -1), nullptr, 0);
  }

 private:
  [[noreturn]] void serve(const std::string& store_path, const std::string& name, const std::string& transports,
                          Counters& counters) const {
    close(pipe_[1]);
    char byte;
    if (read(pipe_[0], &byte, 1) != 1) _exit(0);
    const std::shared_ptr<Store> store = file_store(store_path).value();
    auto options = options_for(name, transports);
    options.setup = [&counters](Agent& agent) { return add_functions(agent, counters); };
    const auto agent = test::start(store, options);
    for (;;) pause();
  }

  static Result<> add_functions(Agent& agent, Counters& counters) {
    MUSTER_TRY(agent.add_function("echo", echo, {.idempotent = true}));
    MUSTER_TRY(agent.add_function("mark",
                                  [&counters](Request request, Responder responder) {
                                    const auto call = Reader(request.arguments.head).get<uint64_t>();
                                    if (call && *call < kMaxCalls) counters.runs[*call].fetch_add(1);
                                    responder.reply(std::move(request.arguments));
                                  },
                                  {}));
    MUSTER_TRY(agent.add_function("sleep", [](Request, Responder) { pause(); }, {}));
    return agent.add_function("leave_a_child",
                              [](Request, Responder responder) {
                                const pid_t child = fork();
                                if (child == 0) {
                                  for (;;) pause();
                                }
                                Writer number;
                                number.put<int32_t>(child);
                                responder.reply(Message{number.take(), {}});
                              },
                              {});
  }

  std::array<int, 2> pipe_{};
  pid_t pid_ = -1;
};

class RpcProcesses : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    char path[] = "/tmp/muster-rpc-XXXXXX";
    const int file = mkstemp(path);
    ASSERT_GE(file, 0);
    close(file);
    path_ = path;
    void* const memory = mmap(nullptr, sizeof(Counters), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    counters_ = static_cast<Counters*>(memory);
  }
  void TearDown() override {
    if (agent_) (void)agent_->shutdown(Deadline::after(kPatience));
    servers_.clear();
    munmap(counters_, sizeof(Counters));
    std::filesystem::remove(path_);
  }

  ServerProcess& prepare(const std::string& name) {
    servers_.push_back(std::make_unique<ServerProcess>(path_, name, GetParam(), *counters_));
    return *servers_.back();
  }
  void join(Duration heartbeat_timeout = 30s) {
    store_ = file_store(path_).value();
    auto options = options_for("test", GetParam());
    options.heartbeat_timeout = heartbeat_timeout;
    agent_ = test::start(store_, options);
  }

  std::string path_;
  Counters* counters_ = nullptr;
  std::vector<std::unique_ptr<ServerProcess>> servers_;
  std::shared_ptr<Store> store_;
  std::shared_ptr<Agent> agent_;
};

TEST_P(RpcProcesses, ADeathFailsTheCallsOfItsWorkerOnly) {
  const auto &a = prepare("a"), &b = prepare("b");
  a.begin();
  b.begin();
  join();
  EXPECT_EQ(text(result_of(agent_->call("a", "echo", text("x"), {}))), "x");
  EXPECT_EQ(text(result_of(agent_->call("b", "echo", text("y"), {}))), "y");
  const Future lost = agent_->call("a", "sleep", {}, {});
  a.signal(SIGKILL);
  const CallError error = error_of(lost);
  EXPECT_EQ(error.error.code, ErrorCode::kPeerLost) << error.to_string();
  EXPECT_NE(error.to_string().find("worker \"a\" (id "), std::string::npos) << error.to_string();
  EXPECT_NE(error.to_string().find("may have run"), std::string::npos) << error.to_string();
  EXPECT_EQ(text(result_of(agent_->call("b", "echo", text("z"), {}))), "z");
  const CallError later = error_of(agent_->call("a", "echo", {}, {.timeout = 5s}));
  EXPECT_EQ(later.error.code, ErrorCode::kPeerLost) << later.to_string();
}

/// The child holds the sockets of the dead process open.
TEST_P(RpcProcesses, ADeathIsNoticedAlthoughAChildLives) {
  const auto& a = prepare("a");
  a.begin();
  join();
  const Message left = result_of(agent_->call("a", "leave_a_child", {}, {}));
  const pid_t child = Reader(left.head).get<int32_t>().value();
  const Future lost = agent_->call("a", "sleep", {}, {});
  a.signal(SIGKILL);
  EXPECT_EQ(error_of(lost).error.code, ErrorCode::kPeerLost);
  kill(child, SIGKILL);
}

TEST_P(RpcProcesses, AStoppedWorkerMissesItsHeartbeats) {
  const auto& a = prepare("a");
  a.begin();
  join(500ms);
  EXPECT_EQ(text(result_of(agent_->call("a", "echo", text("x"), {}))), "x");
  a.stop();
  const CallError error = error_of(agent_->call("a", "echo", text("x"), {}));
  EXPECT_EQ(error.error.code, ErrorCode::kPeerLost) << error.to_string();
  EXPECT_NE(error.to_string().find("has not answered a ping for 0.5 s"), std::string::npos) << error.to_string();
  a.signal(SIGCONT);
}

/// A child stops this process for longer than the heartbeat timeout, and continues it.
TEST_P(RpcProcesses, AStopOfThisProcessIsNoLossOfItsWorkers) {
  const auto& a = prepare("a");
  a.begin();
  join(400ms);
  EXPECT_EQ(text(result_of(agent_->call("a", "echo", text("x"), {}))), "x");
  const Future sleeping = agent_->call("a", "sleep", {}, {.timeout = 4s});
  const pid_t child = fork();
  if (child == 0) {
    kill(getppid(), SIGSTOP);
    usleep(1'500'000);  // tidy: allow(sleep) the length of the stop
    kill(getppid(), SIGCONT);
    _exit(0);
  }
  const CallError error = error_of(sleeping);
  EXPECT_EQ(error.error.code, ErrorCode::kTimeout) << error.to_string();
  waitpid(child, nullptr, 0);
}

TEST_P(RpcProcesses, ABusyFunctionDoesNotStopHeartbeats) {
  const auto& a = prepare("a");
  a.begin();
  join(200ms);
  const CallError error = error_of(agent_->call("a", "sleep", {}, {.timeout = 1s}));
  EXPECT_EQ(error.error.code, ErrorCode::kTimeout) << error.to_string();
}

TEST_P(RpcProcesses, IdempotentCallsGoToTheWorkerThatReplacesADeadOne) {
  auto &first = prepare("a"), &second = prepare("a");
  first.begin();
  join();
  EXPECT_EQ(text(result_of(agent_->call("a", "echo", text("x"), {}))), "x");
  first.stop();
  const Future moved = agent_->call("a", "echo", text("again"), {.idempotent = true});
  first.end();
  second.begin();
  EXPECT_EQ(text(result_of(moved)), "again");
}

/// The caller says that the call may run twice, but the function was not added as such.
TEST_P(RpcProcesses, AFunctionThatIsNotIdempotentRunsNoCallAgain) {
  auto &first = prepare("a"), &second = prepare("a");
  first.begin();
  join();
  EXPECT_EQ(text(result_of(agent_->call("a", "echo", text("x"), {}))), "x");
  first.stop();
  Writer number;
  number.put<uint64_t>(7);
  const Future moved = agent_->call("a", "mark", Message{number.take(), {}}, {.idempotent = true});
  first.end();
  second.begin();
  const CallError error = error_of(moved);
  EXPECT_EQ(error.error.code, ErrorCode::kPeerLost);
  EXPECT_NE(error.error.message.find("\"mark\" was not added as idempotent"), std::string::npos) << error.to_string();
  EXPECT_EQ(counters_->runs[7], 0);
}

/// Servers of one name are killed and replaced at random while calls go on. A call that succeeded ran once, and one
/// that failed ran once at most.
TEST_P(RpcProcesses, CallsRunAtMostOnceUnderRandomKills) {
  const uint64_t seed = muster::test::from_environment("MUSTER_SEED", 1);
  SCOPED_TRACE("MUSTER_SEED=" + std::to_string(seed));
  Random random(seed);
  for (int i = 0; i < kMaxServers; ++i) prepare("a");
  servers_[0]->begin();
  join();
  std::atomic<bool> over = false;
  std::thread killer([&] {
    for (int i = 0; i + 1 < kMaxServers && !over; ++i) {
      // tidy: allow(sleep) anywhere within the calls
      std::this_thread::sleep_for(std::chrono::microseconds(random.between(1000, 60'000)));
      servers_[i]->end();
      servers_[i + 1]->begin();
    }
  });
  std::vector<Future> futures;
  for (uint64_t call = 0; call < 10'000; ++call) {
    Writer number;
    number.put(call);
    futures.push_back(agent_->call("a", "mark", Message{number.take(), {}}, {.timeout = 30s}));
    if (call % 64 == 63) (void)futures[call - 60].wait();
  }
  int acknowledged = 0;
  for (uint64_t call = 0; call < futures.size(); ++call) {
    const CallResult& result = futures[call].wait();
    const int runs = counters_->runs[call];
    if (result) {
      ++acknowledged;
      EXPECT_EQ(runs, 1) << "call " << call;
    } else {
      EXPECT_LE(runs, 1) << "call " << call << ": " << result.error().to_string();
      EXPECT_EQ(result.error().error.code, ErrorCode::kPeerLost) << result.error().to_string();
    }
  }
  over = true;
  killer.join();
  EXPECT_GT(acknowledged, 0);
  RecordProperty("acknowledged", acknowledged);
}

INSTANTIATE_TEST_SUITE_P(Transports, RpcProcesses, testing::Values("shm,tcp", "tcp"), [](const auto& info) {
  const std::string name = info.param;
  return name.substr(0, name.find(','));
});

}  // namespace
}  // namespace muster::rpc::test
