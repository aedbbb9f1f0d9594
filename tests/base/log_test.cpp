#include "muster/base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace muster {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

const std::pair<LogLevel, std::string> kLines[] = {
    {LogLevel::kTrace, "a trace"},     {LogLevel::kDebug, "a detail"}, {LogLevel::kInfo, "a fact"},
    {LogLevel::kWarning, "a warning"}, {LogLevel::kError, "an error"},
};

/// Logs a line of each level and exits with the number of levels that are enabled.
[[noreturn]] void write_all(const char* level) {
  level == nullptr ? unsetenv("MUSTER_LOG") : setenv("MUSTER_LOG", level, 1);
  int enabled = 0;
  for (const auto& [severity, text] : kLines) {
    log(severity, text);
    enabled += log_enabled(severity);
  }
  std::exit(enabled);
}

/// A process reads the level only once. So each level is tested in its own process: a death test that runs this program
/// again.
void expect_lines(const char* level, int count) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  testing::Matcher<const std::string&> expected = testing::_;
  int silent = static_cast<int>(std::size(kLines)) - count;
  for (const auto& [severity, text] : kLines) {
    const testing::Matcher<const std::string&> line = HasSubstr(text);
    expected = AllOf(expected, silent-- > 0 ? testing::Matcher<const std::string&>(Not(line)) : line);
  }
  EXPECT_EXIT(write_all(level), testing::ExitedWithCode(count), expected);
}

TEST(LogDeathTest, WritesWarningsByDefault) { expect_lines(nullptr, 2); }
TEST(LogDeathTest, WritesEverythingFromTraceOn) { expect_lines("trace", 5); }
TEST(LogDeathTest, LeavesOutTheTraceFromDebugOn) { expect_lines("debug", 4); }
TEST(LogDeathTest, LeavesOutDetailsFromInfoOn) { expect_lines("info", 3); }
TEST(LogDeathTest, WritesWarningsFromWarningOn) { expect_lines("warning", 2); }
TEST(LogDeathTest, WritesOnlyErrorsFromErrorOn) { expect_lines("error", 1); }
TEST(LogDeathTest, IsSilentWhenOff) {
  expect_lines("off", 0);
  EXPECT_EXIT(write_all("off"), testing::ExitedWithCode(0), testing::StrEq(""));
}

TEST(LogDeathTest, ReportsAnUnknownLevelAndUsesWarning) {
  expect_lines("loud", 2);
  EXPECT_EXIT(write_all("loud"), testing::ExitedWithCode(2), HasSubstr("MUSTER_LOG='loud' is not a level; use trace"));
}

}  // namespace
}  // namespace muster
