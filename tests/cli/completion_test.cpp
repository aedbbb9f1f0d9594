#include "muster/cli/completion.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "muster/cli/store_command.h"
#include "muster/launch/options/option_table.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

TEST(Completion, EveryShellKnowsEveryOptionAndCommand) {
  for (const std::string shell : {"bash", "zsh", "fish"}) {
    const auto script = completion_script(shell, {{"run", {}, {}}, {"bench", {}, {}}});
    ASSERT_TRUE(script);
    EXPECT_THAT(*script, HasSubstr("run bench"));
    for (const auto& row : option_table()) {
      const std::string name = shell == "fish" ? "-l " + row.name().substr(2) : row.name();
      EXPECT_EQ(script->find(name) == std::string::npos, std::string(row.group).empty()) << shell << " " << name;
    }
  }
}

TEST(Completion, WordsThatAnOptionTakesAreOffered) {
  for (const std::string shell : {"bash", "zsh", "fish"})
    EXPECT_THAT(completion_script(shell, {}).value(), HasSubstr("static c10d parallel redis etcd"));
}

TEST(Completion, SubcommandsAndTheirOptionsAreOffered) {
  for (const std::string shell : {"bash", "zsh", "fish"}) {
    const std::string script =
        completion_script(shell, {{"run", {}, {}}, {"store", store_subcommands(), {}}}).value_or("");
    EXPECT_THAT(script, HasSubstr("serve get set add delete barrier ls watch stat"));
    EXPECT_THAT(script, HasSubstr(shell == "fish" ? "seen_subcommand_from watch' -l interval" : "--interval"));
  }
}

TEST(Completion, AnotherShellIsRefused) {
  EXPECT_THAT(completion_script("tcsh", {}).error().message, HasSubstr("bash, zsh or fish, not 'tcsh'"));
}

}  // namespace
}  // namespace muster
