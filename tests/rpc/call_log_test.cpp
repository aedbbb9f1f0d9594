// What other processes see of a worker's calls.
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <future>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "muster/base/random.h"
#include "muster/rpc/log/call_log_layout.h"
#include "muster/rpc/log/call_log_reader.h"
#include "rpc/workers.h"

namespace muster::rpc::test {
namespace {

using testing::HasSubstr;

/// Two workers of this process, and a function of b that returns when it is told to.
class RpcCallLog : public testing::Test {
 protected:
  void start(const char* entries) {
    setenv("MUSTER_RECORDER", entries, 1);
    a_ = test::start(store_, options_for("a", "shm"));
    b_ = test::start(store_, options_for("b", "shm"));
    ASSERT_TRUE(b_->add_function("echo", echo, {}));
    ASSERT_TRUE(b_->add_function("wait",
                                 [this](Request, Responder responder) {
                                   waits_.set_value();
                                   go_.get_future().wait();
                                   responder.reply(text("done"));
                                 },
                                 {}));
  }
  /// Calls b's function, and returns once it runs.
  Future call_that_waits() {
    auto future = a_->call("b", "wait", text("abc"), {});
    waits_.get_future().wait();
    return future;
  }
  void TearDown() override {
    unsetenv("MUSTER_RECORDER");
    for (const auto& agent : {a_, b_}) {
      EXPECT_TRUE(agent->shutdown(Deadline::after(kPatience)));
    }
  }
  static CallRecording log_of(const std::string& worker) {
    for (CallRecording& log : call_logs_of(getpid())) {
      if (log.worker.name == worker) return std::move(log);
    }
    ADD_FAILURE() << "no log of " << worker;
    return {};
  }
  /// The call of this function in a log, which has it once.
  static CallRecord find(const CallRecording& log, const std::string& function) {
    std::vector<CallRecord> found;
    for (const CallRecord& call : log.calls) {
      if (call.function == function) found.push_back(call);
    }
    EXPECT_EQ(found.size(), 1U);
    return found.empty() ? CallRecord() : found[0];
  }

  const std::shared_ptr<Store> store_ = memory_store();
  std::shared_ptr<Agent> a_, b_;
  std::promise<void> waits_, go_;
};

TEST_F(RpcCallLog, ShowsBothSidesOfACall) {
  start("64");
  const Future future = call_that_waits();
  const CallRecording a = log_of("a"), b = log_of("b");
  EXPECT_EQ(a.group_id, b.group_id);
  EXPECT_EQ(a.pid, getpid());
  const CallRecord call = find(a, "wait"), served = find(b, "wait");
  EXPECT_EQ(call.side, CallSide::kCaller);
  EXPECT_EQ(served.side, CallSide::kCallee);
  for (const CallRecord& one : {call, served}) {
    EXPECT_EQ(one.state, RecordState::kRunning);
    EXPECT_EQ(one.request, 1U);
    EXPECT_EQ(one.request_bytes, 3U);
    EXPECT_FALSE(one.ended);
    EXPECT_LE(*one.begun, *one.started);
  }
  EXPECT_EQ(call.peer_id, b.worker.id);
  EXPECT_EQ(served.peer_id, a.worker.id);
  EXPECT_EQ(call.to_string(), "call of \"wait\" at worker \"b\" (request 1, 3 bytes)");
  EXPECT_EQ(served.to_string(), "\"wait\" for worker \"a\" (request 1, 3 bytes)");

  go_.set_value();
  result_of(future);
  const CallRecord done = find(log_of("a"), "wait");
  EXPECT_EQ(done.state, RecordState::kDone);
  EXPECT_EQ(done.reply_bytes, 4U);
  EXPECT_GE(*done.ended, *done.started);
}

TEST_F(RpcCallLog, KeepsACallThatIsUnderWayWhileOthersPass) {
  start("16");
  const Future future = call_that_waits();
  for (int i = 0; i < 100; ++i) result_of(a_->call("b", "echo", text("x"), {}));
  for (const char* worker : {"a", "b"}) {
    const CallRecording log = log_of(worker);
    EXPECT_EQ(log.calls.size(), 16U);
    EXPECT_EQ(log.calls.front().function, "wait") << "the oldest";
    EXPECT_EQ(log.calls.back().number, 101U);
    EXPECT_EQ(log.last_calls(2).size(), 3U) << "the one under way, and two others";
  }
  go_.set_value();
  result_of(future);
}

TEST_F(RpcCallLog, ShowsTheNoteOfAFunction) {
  start("64");
  EXPECT_EQ(text(result_of(a_->call("b", "echo#method add", text("x"), {}))), "x");
  EXPECT_EQ(text(result_of(a_->call("b", "echo#", text("y"), {}))), "y");
  EXPECT_THAT(error_of(a_->call("b", "none#method add", {}, {})).to_string(),
              HasSubstr("(during call of \"method add\" at worker \"b\" (request 3))"));
  for (const char* worker : {"a", "b"}) {
    const CallRecording log = log_of(worker);
    ASSERT_EQ(log.calls.size(), 3U);
    EXPECT_EQ(log.calls[0].function, "method add");
    EXPECT_EQ(log.calls[1].function, "echo");
  }
  EXPECT_EQ(b_->add_function("a#b", echo, {}).error().code, ErrorCode::kInvalidArgument);
  go_.set_value();
}

TEST_F(RpcCallLog, CountsCallsForWhichItHasNoRoom) {
  start("2");
  std::vector<Future> futures;
  futures.push_back(call_that_waits());
  for (int i = 0; i < 9; ++i) futures.push_back(a_->call("nobody", "echo", {}, {}));
  CallRecording log = log_of("a");
  EXPECT_EQ(log.calls.size(), 2U);
  ASSERT_EQ(log.functions.size(), 2U);
  EXPECT_EQ(log.functions[1].function, "echo");
  EXPECT_EQ(log.functions[1].peer, "nobody");
  EXPECT_EQ(log.functions[1].under_way(), 9U);
  for (size_t i = 1; i < futures.size(); ++i) futures[i].cancel();
  go_.set_value();
  result_of(futures[0]);
  log = log_of("a");
  EXPECT_EQ(log.functions[1].failed, 9U);
  EXPECT_EQ(log.functions[1].under_way(), 0U);
  EXPECT_EQ(find(log, "echo").error, ErrorCode::kAborted);
  EXPECT_EQ(find(log, "echo").peer_id, -1) << "it never joined";
  EXPECT_EQ(log.functions[0].reply_bytes, 4U);
  EXPECT_TRUE(log.functions[0].latencies.percentile(0.99));
}

TEST_F(RpcCallLog, CountsMoreFunctionsThanItHasRoomForTogether) {
  start("16");
  for (int i = 0; i < 600; ++i) error_of(a_->call("b", "no function " + std::to_string(i), {}, {}));
  const CallRecording log = log_of("b");
  ASSERT_EQ(log.functions.size(), kMaxFunctionEntries);
  EXPECT_EQ(log.functions.back().function, "(all other functions)");
  EXPECT_EQ(log.functions.back().failed, 600 - kMaxFunctionEntries + 2);
  EXPECT_EQ(log.functions.back().side, CallSide::kCallee);
  EXPECT_EQ(log_of("a").functions[kMaxFunctionEntries - 2].side, CallSide::kCaller);
  EXPECT_EQ(log.calls.back().error, ErrorCode::kNotFound);
  go_.set_value();
}

TEST_F(RpcCallLog, SaysWhoWaitsForWhom) {
  start("64");
  EXPECT_EQ(describe_waits(call_logs_of(getpid()), 10), "");
  const Future future = call_that_waits();
  const Future lost = a_->call("nobody", "echo", {}, {});
  std::vector<CallRecording> logs = call_logs_of(getpid());
  for (CallRecording& log : logs) log.taken = log.taken + std::chrono::seconds(10);
  const std::string waits = describe_waits(logs, 10);
  EXPECT_THAT(waits, HasSubstr("worker \"a\" (id 0,"));
  EXPECT_THAT(waits, HasSubstr("has waited 10.0 s for \"wait\" at worker \"b\" (id 1,"));
  EXPECT_THAT(waits, HasSubstr("which has been in it for 10.0 s\n"));
  EXPECT_THAT(waits, HasSubstr("\"echo\" at worker \"nobody\", which has not joined\n"));
  EXPECT_THAT(describe_waits(logs, 1), HasSubstr("and 1 more calls that wait\n"));
  logs[1].stopped = true;
  EXPECT_THAT(describe_waits(logs, 10), HasSubstr("which is stopped, by a signal or a debugger\n"));
  logs[1].calls.clear();
  logs[1].stopped = false;
  EXPECT_THAT(describe_waits(logs, 10), HasSubstr("whose log has no room for all its calls\n"));
  logs[1].functions.clear();
  EXPECT_THAT(describe_waits(logs, 10), HasSubstr("which does not have the call\n"));
  logs[1].group_id = 0;
  EXPECT_THAT(describe_waits(logs, 10), HasSubstr("which was not found on this host\n"));
  lost.cancel();
  go_.set_value();
  result_of(future);
}

TEST_F(RpcCallLog, GivesJsonAndATrace) {
  start("64");
  const Future future = call_that_waits();
  result_of(a_->call("b", "echo", text("x"), {}));
  const auto logs = call_logs_of(getpid());
  const auto dump = nlohmann::json::parse(to_json({}, logs, 10));
  ASSERT_EQ(dump.size(), 2U);
  EXPECT_EQ(dump[0]["worker"], "a");
  EXPECT_EQ(dump[0]["operations"][0]["operation"], "call");
  EXPECT_EQ(dump[0]["operations"][0]["state"], "running");
  EXPECT_EQ(dump[1]["operations"][1]["operation"], "function");
  EXPECT_EQ(dump[1]["operations"][1]["function"], "echo");
  EXPECT_EQ(dump[1]["functions"][1]["ended"], 1);
  EXPECT_GT(dump[1]["functions"][1]["p50_microseconds"].get<double>(), 0);

  const auto trace = nlohmann::json::parse(to_trace({}, logs));
  std::map<std::string, std::set<std::string>> arrows;  // by their ids, the phases
  std::set<std::pair<int, int>> lanes;
  int slices = 0;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "X") {
      ++slices;
      EXPECT_GE(event["ts"].get<double>(), 0);
      lanes.emplace(event["pid"], event["tid"]);
    }
    if (event.contains("id")) arrows[event["id"]].insert(event["ph"]);
  }
  EXPECT_EQ(slices, 4);
  EXPECT_EQ(lanes.size(), 4U) << "calls that overlap lie in different lanes";
  EXPECT_EQ(arrows.size(), 2U);
  for (const auto& [id, phases] : arrows) EXPECT_EQ(phases, (std::set<std::string>{"s", "f"})) << id;
  go_.set_value();
  result_of(future);
}

TEST_F(RpcCallLog, IsOffWithoutARecorder) {
  start("0");
  result_of(a_->call("b", "echo", text("x"), {}));
  EXPECT_TRUE(call_logs_of(getpid()).empty());
  go_.set_value();
}

TEST(CallLogLayout, BucketsHoldALatencyToWithinSixPercent) {
  for (uint64_t ticks = 1 << kFirstOctave; ticks < uint64_t{1} << kLastOctave; ticks += ticks / 5) {
    EXPECT_NEAR(middle_of(bucket_of(ticks)) / static_cast<double>(ticks), 1, 0.0626) << ticks;
  }
  EXPECT_EQ(bucket_of(0), 0U);
  EXPECT_EQ(bucket_of(UINT64_MAX), kLatencyBuckets - 1);
}

TEST(Latencies, GivesPercentilesOfAnInterval) {
  std::vector<uint32_t> before(kLatencyBuckets), after(kLatencyBuckets);
  before[bucket_of(1'000'000)] = 1000;
  after = before;
  after[bucket_of(1000)] = 99;
  after[bucket_of(50'000)] = 1;
  const Latencies interval = Latencies(after, 2).since(Latencies(before, 2));
  EXPECT_NEAR(static_cast<double>(interval.percentile(0.5)->count()), 2000, 130);
  EXPECT_NEAR(static_cast<double>(interval.percentile(0.99)->count()), 2000, 130);
  EXPECT_NEAR(static_cast<double>(interval.percentile(1)->count()), 100'000, 6500);
  EXPECT_FALSE(Latencies(before, 2).since(Latencies(before, 2)).percentile(0.5));
}

TEST(CallLogReader, RefusesInvalidMemory) {
  for (const size_t size : {size_t{0}, size_t{100}, size_t{1} << 20, size_t{1} << 30}) {
    const Fd memory(memfd_create("muster-calls", MFD_CLOEXEC));
    ASSERT_EQ(ftruncate(memory.get(), static_cast<off_t>(size)), 0);
    EXPECT_EQ(read_call_log(memory).error().code, ErrorCode::kProtocol) << size;
  }
}

/// Another process writes the memory, so it may be anything.
TEST_F(RpcCallLog, ReadsDamagedMemory) {
  start("16");
  for (int i = 0; i < 20; ++i) result_of(a_->call("b", "echo", text("x"), {}));
  const std::vector<Fd> memories = open_memories(getpid(), kCallLogName);
  ASSERT_EQ(memories.size(), 2U);
  Bytes bytes = copy_memory(memories[0], size_t{1} << 30)->first;
  Random random(7);
  const Fd damaged(memfd_create("damaged", MFD_CLOEXEC));
  size_t readable = 0;
  for (int round = 0; round < 300; ++round) {
    Bytes copy = bytes;
    for (int flips = 0; flips < 40; ++flips) {
      // Most of the memory is empty, so the header and the entries in use are damaged most often.
      const size_t area =
          std::array{sizeof(CallLogHeader), sizeof(FunctionEntry), size_t{16} * sizeof(CallEntry)}[flips % 3];
      const size_t begin = std::array{sizeof(uint64_t), sizeof(CallLogHeader), calls_offset()}[flips % 3];
      const size_t at = begin + random.below(area - sizeof(uint64_t)) / 8 * 8;
      if (at == offsetof(CallLogHeader, calls)) continue;  // it would only be refused
      const uint64_t value = flips % 2 == 0 ? random.next() : uint64_t{0} - random.below(3);
      std::memcpy(copy.data() + at, &value, sizeof value);
    }
    ASSERT_EQ(pwrite(damaged.get(), copy.data(), copy.size(), 0), static_cast<ssize_t>(copy.size()));
    const auto log = read_call_log(damaged);
    if (!log) continue;
    ++readable;
    EXPECT_LE(log->calls.size(), 16U);
    EXPECT_TRUE(nlohmann::json::accept(to_json({}, {*log}, 100)));
    EXPECT_TRUE(nlohmann::json::accept(to_trace({}, {*log})));
    (void)describe_waits({*log}, 10);
  }
  EXPECT_GT(readable, 200U);
  go_.set_value();
}

}  // namespace
}  // namespace muster::rpc::test
