// The flight recorder: written by its own process, and read by others.
#include "muster/flight/recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <thread>

#include "muster/flight/recorder_reader.h"

namespace muster {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const GroupSpec kMembership{1, 4, "test", 7};

Operation all_reduce(uint64_t sequence, size_t count = 12, const std::string& site = "") {
  static float memory[64];
  Operation operation;
  operation.call = {Collective::kAllReduce, Dtype::kFloat32, ReduceOp::kSum, 0, count, 0, sequence};
  operation.input = operation.output = BufferView(memory, count, Dtype::kFloat32);
  operation.site = intern_call_site(site);
  return operation;
}

/// The only recording of this process. Each test has only one recorder.
Recording own_recording() {
  const auto all = recordings_of(getpid());
  EXPECT_EQ(all.size(), 1U);
  return all.empty() ? Recording{} : all[0];
}

TEST(Recorder, JoinsSpansOfAnotherRecorderToTheirGroup) {
  const auto group = Recorder::create(kMembership, 16), steps = Recorder::create(kMembership, 16);
  group->submitted(all_reduce(1), Recorder::Start::kNow);
  for (uint64_t step = 1; step <= 20; ++step) {
    Span span{Span::Kind::kBucket, step, 2, 4096, TimePoint{10}, TimePoint{40}, TimePoint{20}, TimePoint{30}};
    span.names = steps->keep_text("head.bias\nhead.weight\n");
    span.last = 1;
    steps->record(span);
  }
  const Recording recording = own_recording();
  EXPECT_EQ(recording.records.size(), 1U);
  ASSERT_EQ(recording.spans.size(), 16U);
  const RecordedSpan& span = recording.spans[0];
  EXPECT_EQ(span.kind, Span::Kind::kBucket);
  EXPECT_EQ(span.step, 5U);
  EXPECT_EQ(span.bucket, 2U);
  EXPECT_EQ(span.bytes, 4096U);
  EXPECT_EQ(span.begin.ns, 10);
  EXPECT_EQ(span.full.ns, 20);
  EXPECT_EQ(span.started.ns, 30);
  EXPECT_EQ(span.end.ns, 40);
  EXPECT_THAT(span.parameters, ElementsAre("head.bias", "head.weight"));
  EXPECT_EQ(span.filled_by, "head.weight");
}

TEST(Recorder, KeepsTextsForSpansAsLongAsThereIsRoom) {
  const auto steps = Recorder::create(kMembership, 16);
  const std::string long_names(60 << 10, 'x');
  for (const std::string& names : {long_names, long_names, std::string("short")}) {
    Span span{.kind = Span::Kind::kBucket};
    span.names = steps->keep_text(names);
    steps->record(span);
  }
  const Recording recording = own_recording();
  ASSERT_EQ(recording.spans.size(), 3U);
  EXPECT_THAT(recording.spans[0].parameters, ElementsAre(long_names));
  EXPECT_THAT(recording.spans[1].parameters, ElementsAre());
  EXPECT_THAT(recording.spans[2].parameters, ElementsAre("short"));
}

TEST(Recorder, ShowsAnOperationsFieldsAndState) {
  const auto recorder = Recorder::create(kMembership, 16);
  recorder->set_group("shm", 99);
  const auto first = recorder->submitted(all_reduce(1, 12, "train.py:71"), Recorder::Start::kNow);
  recorder->ended(first, {});
  const auto second = recorder->submitted(all_reduce(2), Recorder::Start::kLater);
  recorder->started(second);
  recorder->ended(second, fail(ErrorCode::kPeerLost, "gone", 3));
  recorder->submitted(all_reduce(3), Recorder::Start::kLater);

  const Recording recording = own_recording();
  EXPECT_EQ(recording.rank, 1);
  EXPECT_EQ(recording.size, 4);
  EXPECT_EQ(recording.group, "test");
  EXPECT_EQ(recording.generation, 7U);
  EXPECT_EQ(recording.transport, "shm");
  EXPECT_EQ(recording.group_id, 99U);
  EXPECT_EQ(recording.pid, getpid());
  ASSERT_EQ(recording.records.size(), 3U);
  const Record& done = recording.records[0];
  EXPECT_EQ(done.state, RecordState::kDone);
  EXPECT_EQ(done.with_site(), "all_reduce #1 (float32[12], sum) at train.py:71");
  EXPECT_EQ(done.input_bytes, 48U);
  ASSERT_TRUE(done.submitted && done.started && done.ended);
  EXPECT_LE(*done.submitted, *done.started);
  EXPECT_LE(*done.started, *done.ended);
  EXPECT_LE(*done.ended, recording.taken + 1ms);  // tolerance, because the times come from two clocks
  const Record& failed = recording.records[1];
  EXPECT_EQ(failed.state, RecordState::kFailed);
  EXPECT_EQ(failed.error, ErrorCode::kPeerLost);
  EXPECT_EQ(failed.blamed, 3);
  EXPECT_EQ(failed.with_site(), "all_reduce #2 (float32[12], sum)");
  EXPECT_EQ(recording.records[2].state, RecordState::kQueued);
  EXPECT_FALSE(recording.records[2].started || recording.records[2].ended);
  EXPECT_EQ(recording.last_begun()->call.sequence, 2U);
  EXPECT_EQ(recording.find(4), nullptr);
}

TEST(Recorder, ShowsMessages) {
  const auto recorder = Recorder::create(kMembership, 16);
  float value = 0;
  recorder->sending({&value, 1, Dtype::kFloat32}, 3, 7, 0);
  recorder->receiving({&value, 1, Dtype::kFloat32}, kAnyRank, 0, intern_call_site("serve.py:5"));
  const Recording recording = own_recording();
  ASSERT_EQ(recording.records.size(), 2U);
  EXPECT_EQ(recording.records[0].to_string(), "send to rank 3 (float32[1], tag 7)");
  EXPECT_EQ(recording.records[1].with_site(), "receive from any rank (float32[1], tag 0) at serve.py:5");
  EXPECT_EQ(recording.last_begun(), nullptr);
}

TEST(Recorder, JoinsMessagesOfAnotherRecorderToTheirGroup) {
  const auto messages = Recorder::create(kMembership, 16), group = Recorder::create(kMembership, 16),
             others = Recorder::create(kMembership, 16);
  messages->set_group("shm", 7);
  group->set_group("shm", 7);
  others->set_group("shm", 8);
  float value = 0;
  const auto send = [&] { messages->sending({&value, 1, Dtype::kFloat32}, 3, 7, 0); };
  send();
  const auto joined = [] {
    std::vector<std::string> records;
    for (const Recording& recording : recordings_of(getpid())) {
      EXPECT_TRUE(recording.group_id == 7 || recording.records.empty());
      for (const Record& record : recording.records) records.push_back(record.to_string());
    }
    return records;
  };
  EXPECT_EQ(recordings_of(getpid()).size(), 2U) << "also before the first collective";
  EXPECT_THAT(joined(), ElementsAre(HasSubstr("send")));
  group->submitted(all_reduce(1), Recorder::Start::kNow);
  send();
  group->submitted(all_reduce(2), Recorder::Start::kNow);
  EXPECT_THAT(joined(), ElementsAre(HasSubstr("send"), HasSubstr("all_reduce #1"), HasSubstr("send"),
                                    HasSubstr("all_reduce #2")));
}

TEST(Recorder, KeepsTheLatestSpans) {
  const auto recorder = Recorder::create(kMembership, 5);  // 5 is rounded up to 8
  const auto lost = recorder->submitted(all_reduce(1), Recorder::Start::kLater);
  for (uint64_t sequence = 2; sequence <= 20; ++sequence) {
    recorder->submitted(all_reduce(sequence), Recorder::Start::kNow);
  }
  recorder->ended(lost, fail(ErrorCode::kAborted, "must not land in another operation's place"));
  std::vector<uint64_t> kept;
  for (const Record& record : own_recording().records) {
    kept.push_back(record.call.sequence);
    EXPECT_EQ(record.state, RecordState::kRunning);
  }
  EXPECT_THAT(kept, ElementsAre(13, 14, 15, 16, 17, 18, 19, 20));
}

TEST(Recorder, KeepsAsManySpansAsConfigured) {
  setenv("MUSTER_RECORDER", "64", 1);
  EXPECT_EQ(Recorder::entries_from_environment(), 64U);
  setenv("MUSTER_RECORDER", "0", 1);
  EXPECT_EQ(Recorder::entries_from_environment(), 0U);
  setenv("MUSTER_RECORDER", "many", 1);
  EXPECT_EQ(Recorder::entries_from_environment(), 1024U);
  unsetenv("MUSTER_RECORDER");
  EXPECT_EQ(Recorder::entries_from_environment(), 1024U);
  EXPECT_EQ(Recorder::create(kMembership, 0), nullptr);
}

TEST(Recorder, HandlesAFullCallSiteTable) {
  const auto recorder = Recorder::create(kMembership, 4);
  const std::string folder(1000, 'x');
  for (int line = 1; line <= 200; ++line) {
    recorder->submitted(all_reduce(line, 12, folder + ":" + std::to_string(line)), Recorder::Start::kNow);
  }
  recorder->submitted(all_reduce(201, 12, folder + ":1"), Recorder::Start::kNow);
  const Recording recording = own_recording();
  EXPECT_EQ(recording.records[2].site, "");
  EXPECT_EQ(recording.records[3].site, folder + ":1");
}

TEST(Recorder, IsReadableWhileItIsWritten) {
  const auto recorder = Recorder::create(kMembership, 8);
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    for (uint64_t sequence = 1; !stop; ++sequence) {
      // The count depends on the sequence number. So a reader can check that all words belong to one operation.
      const auto ticket = recorder->submitted(all_reduce(sequence, sequence % 64), Recorder::Start::kNow);
      recorder->ended(ticket, {});
    }
  });
  size_t seen = 0;
  for (int round = 0; round < 200 || seen == 0; ++round) {
    for (const Record& record : own_recording().records) {
      EXPECT_EQ(record.call.count, record.call.sequence % 64);
      EXPECT_EQ(record.number, record.call.sequence);
      ++seen;
    }
  }
  stop = true;
  writer.join();
}

TEST(Recorder, IsReadableInAStoppedProcess) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const auto inherited = Recorder::create({0, 4, "inherited", 0}, 4);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto recorder = Recorder::create(kMembership, 4);
    recorder->submitted(all_reduce(9), Recorder::Start::kNow);
    if (write(ready[1], "x", 1) != 1) _exit(1);
    for (;;) pause();
  }
  char byte;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  EXPECT_FALSE(is_stopped(child));
  kill(child, SIGSTOP);
  ASSERT_EQ(waitpid(child, nullptr, WUNTRACED), child);
  EXPECT_TRUE(is_stopped(child));
  const auto recordings = recordings_of(child);
  ASSERT_EQ(recordings.size(), 1U) << "what it inherited is its parent's";
  EXPECT_EQ(recordings[0].group, "test");
  EXPECT_EQ(recordings[0].last_begun()->to_string(), "all_reduce #9 (float32[12], sum)");
  EXPECT_THAT(processes_with_recordings(), testing::Contains(child));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(recordings_of(child).empty());
  close(ready[0]);
  close(ready[1]);
}

TEST(Recorder, RefusesInvalidMemory) {
  for (const size_t size : {size_t{0}, size_t{100}, size_t{1} << 20, size_t{1} << 30}) {
    const Fd memory(memfd_create("muster-recorder", MFD_CLOEXEC));
    ASSERT_EQ(ftruncate(memory.get(), static_cast<off_t>(size)), 0);
    EXPECT_EQ(read_recording(memory).error().code, ErrorCode::kProtocol) << size;
  }
}

TEST(Recorder, GivesJsonAndATrace) {
  const auto recorder = Recorder::create(kMembership, 16);
  const auto first = recorder->submitted(all_reduce(1, 12, "train.py:71"), Recorder::Start::kNow);
  recorder->ended(first, {});
  recorder->submitted(all_reduce(2), Recorder::Start::kNow);
  const auto recordings = recordings_of(getpid());

  const auto dump = nlohmann::json::parse(to_json(recordings, 1));
  ASSERT_EQ(dump.size(), 1U);
  EXPECT_EQ(dump[0]["rank"], 1);
  ASSERT_EQ(dump[0]["operations"].size(), 1U) << "the last one";
  EXPECT_EQ(dump[0]["operations"][0]["state"], "running");
  EXPECT_FALSE(dump[0]["operations"][0].contains("ended"));

  const auto trace = nlohmann::json::parse(to_trace(recordings));
  std::vector<nlohmann::json> slices;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "X") slices.push_back(event);
  }
  ASSERT_EQ(slices.size(), 2U);
  EXPECT_EQ(slices[0]["name"], "muster:all_reduce");
  EXPECT_EQ(slices[0]["ts"], 0.0);
  EXPECT_EQ(slices[0]["args"]["site"], "train.py:71");
  EXPECT_LE(slices[0]["ts"].get<double>() + slices[0]["dur"].get<double>(), slices[1]["ts"].get<double>());
  EXPECT_EQ(slices[0]["tid"], slices[1]["tid"]);
}

}  // namespace
}  // namespace muster
