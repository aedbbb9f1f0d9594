#include "muster/launch/failure.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iterator>

namespace muster {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr const char* kTraceback =
    "Traceback (most recent call last):\n  File \"a.py\", line 1, in <module>\nValueError: boom\n";

TEST(WorkerExit, DescribesTheExitOfAWorker) {
  const WorkerExit failed = worker_exit(3, "h", 812, 5 << 8);
  EXPECT_EQ(failed.to_string(), "exited with status 5");
  EXPECT_EQ(failed.status(), 5);
  const WorkerExit killed = worker_exit(3, "h", 812, SIGKILL);
  EXPECT_EQ(killed.to_string(), "was ended by signal 9 (SIGKILL)");
  EXPECT_EQ(killed.status(), 137);
  EXPECT_FALSE(killed.ok());
  EXPECT_TRUE(worker_exit(3, "h", 812, 0).ok());
}

TEST(WorkerExit, SaysThatTheOutOfMemoryKillerEndedAWorker) {
  WorkerExit killed = worker_exit(3, "h", 812, SIGKILL);
  killed.cause = out_of_memory_cause({.oom_kills = 1, .limit = 2ULL << 30, .peak = 3ULL << 29});
  EXPECT_EQ(killed.to_string(),
            "was ended by signal 9 (SIGKILL): the kernel's out-of-memory killer ended it, the memory limit is 2 GiB, "
            "the highest use was 1.5 GiB");
  EXPECT_EQ(out_of_memory_cause({}), "the kernel's out-of-memory killer ended it");
}

TEST(LastTraceback, IsTheLastOne) {
  const std::string text = std::string("noise\n") + "Traceback (most recent call last):\n  first\nKeyError: 1\n" +
                           "During handling of the above exception, another exception occurred:\n\n" + kTraceback;
  EXPECT_EQ(last_traceback(text) + "\n", kTraceback);
}

TEST(LastTraceback, LosesThePrefixThatTorchGivesItsLines) {
  const std::string text =
      "[rank1]: Traceback (most recent call last):\n[rank1]:   File \"a.py\"\n[rank1]: ValueError: bad\nlast words\n";
  EXPECT_EQ(last_traceback(text), "Traceback (most recent call last):\n  File \"a.py\"\nValueError: bad\nlast words");
}

TEST(LastTraceback, IsEmptyWhereThereIsNone) {
  EXPECT_EQ(last_traceback("all is well\n"), "");
  EXPECT_EQ(last_traceback("text: Traceback (most recent call last): no\n"), "");
  EXPECT_EQ(last_traceback(""), "");
}

TEST(LastTraceback, ALongOneIsCutInTheMiddle) {
  std::string text = "Traceback (most recent call last):\n";
  for (int i = 0; i < 1000; ++i) text += "  File " + std::to_string(i) + "\n";
  text += "RecursionError: too deep\n";
  const std::string shown = last_traceback(text);
  EXPECT_LE(std::count(shown.begin(), shown.end(), '\n'), 40);
  EXPECT_THAT(shown, StartsWith("Traceback"));
  EXPECT_THAT(shown, EndsWith("RecursionError: too deep"));
}

TEST(ErrorFile, HasTheTracebackOfRecord) {
  EXPECT_EQ(error_file_traceback(R"({"message": {"message": "ValueError: boom",
      "extraInfo": {"py_callstack": "Traceback (most recent call last):\nValueError: boom\n", "timestamp": "1"}}})"),
            "Traceback (most recent call last):\nValueError: boom");
  EXPECT_EQ(error_file_traceback(R"({"message": "words"})"), "words");
  EXPECT_EQ(error_file_traceback(R"({"message": {"message": "words"}})"), "words");
}

TEST(ErrorFile, MayHoldArbitraryBytes) {
  for (const char* text : {"", "{", "[1]", "\xff\xfe", R"({"message": 3})", R"({"message": {"extraInfo": 1}})",
                           R"({"message": {"message": 3, "extraInfo": {"py_callstack": 3}}})"})
    EXPECT_EQ(error_file_traceback(text), "") << text;
}

TEST(RankList, IsShort) {
  EXPECT_EQ(rank_list({}), "");
  EXPECT_EQ(rank_list({4}), "4");
  EXPECT_EQ(rank_list({0, 1}), "0, 1");
  EXPECT_EQ(rank_list({0, 1, 2, 5, 7, 8, 9}), "0-2, 5, 7-9");
}

TEST(FailureReport, NamesTheRankItsTracebackAndTheOthers) {
  const WorkerExit exit{2, "b", 812, 1, 0};
  const std::string report =
      failure_report(exit, kTraceback, "noise", {{"running", {0, 3}}, {"exited with status 0", {1}}});
  EXPECT_THAT(report, StartsWith("rank 2 (host b, pid 812) exited with status 1"));
  EXPECT_THAT(report, HasSubstr("\n    ValueError: boom"));
  EXPECT_THAT(report, HasSubstr("ranks 0, 3 running"));
  EXPECT_THAT(report, HasSubstr("rank 1 exited with status 0; "));
  EXPECT_THAT(report, Not(HasSubstr("noise")));
  EXPECT_EQ(failure_report(exit, "", "", {}), "rank 2 (host b, pid 812) exited with status 1");
}

TEST(FailureReport, ShowsTheLastOutputWithoutATraceback) {
  EXPECT_THAT(failure_report({2, "b", 812, 1, 0}, "", "one\n  x = (\n      ^\nSyntaxError: '(' was never closed\n", {}),
              EndsWith("exited with status 1; its last output:\n    one\n      x = (\n          ^\n"
                       "    SyntaxError: '(' was never closed"));
}

TEST(ExitStatus, IsTheShellsForAFailedExec) {
  EXPECT_EQ(exit_status(Error{ErrorCode::kNotFound, ""}), 127);
  EXPECT_EQ(exit_status(Error{ErrorCode::kInvalidArgument, ""}), 126);
  EXPECT_EQ(exit_status(Error{ErrorCode::kIo, ""}), 1);
}

TEST(OutputTail, ShowEachTextOnceForTheRanksThatWroteIt) {
  EXPECT_EQ(output_tails({{1, "", ""}, {2, "", ""}}), "");
  EXPECT_EQ(output_tails({{1, "step 1\nstep 2\n", ""}, {2, "step 2", ""}, {5, "step 9", "a\nb\nc\n"}}),
            "\n  last output of other ranks:\n   rank 5:\n    b\n    c\n   ranks 1, 2:\n    step 2");
}

TEST(OutputTail, AreCutToAFewRanksAndToTheEndOfALongLine) {
  const std::string longest(5000, 'x');
  std::vector<std::string> lines;
  for (int rank = 0; rank < 9; ++rank) lines.push_back(longest + std::to_string(rank));
  std::vector<OutputTail> words;
  for (int rank = 0; rank < 9; ++rank) words.push_back({rank, lines[static_cast<size_t>(rank)], ""});
  const std::string text = output_tails(words);
  EXPECT_LT(text.size(), 2000u);
  EXPECT_THAT(text, testing::HasSubstr("xxx3"));
  EXPECT_THAT(text, testing::Not(testing::HasSubstr("xxx4")));
}

TEST(ErrorFile, IsWrittenAsByRecordUnlessItExists) {
  const std::string path = testing::TempDir() + "muster-error-" + std::to_string(::getpid()) + ".json";
  WorkerExit exit{3, "host", 17};
  exit.signal = 9;
  write_error_file(path, exit, "Traceback (most recent call last):\nKeyError: \xff");
  write_error_file(path, exit, "another");
  std::ifstream file(path);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  EXPECT_THAT(error_file_traceback(text), testing::StartsWith("Traceback (most recent call last):\nKeyError: "));
  EXPECT_THAT(text, testing::HasSubstr(R"("errorCode":137)"));
  ::unlink(path.c_str());
  write_error_file(path, exit, "");
  std::ifstream killed(path);
  const std::string without_traceback((std::istreambuf_iterator<char>(killed)), {});
  EXPECT_THAT(without_traceback, testing::HasSubstr("rank 3 (host host, pid 17) was ended by signal 9 (SIGKILL)"));
  ::unlink(path.c_str());
}

}  // namespace
}  // namespace muster
