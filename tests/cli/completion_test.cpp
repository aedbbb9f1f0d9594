#include "muster/cli/completion.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "muster/cli/commands.h"
#include "muster/launch/options/option_table.h"

namespace muster {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

std::string complete(const std::vector<std::string>& words) {
  return completions(words, {{"run", "start a job", {}, {}}, {"store", "serve a store", store_subcommands(), {}}});
}

TEST(Completion, OffersCommandsWithTheirSummaries) {
  EXPECT_EQ(complete({""}), "run\tstart a job\nstore\tserve a store\n");
  EXPECT_EQ(complete({}), complete({""}));
  EXPECT_EQ(complete({"st"}), "store\tserve a store\n");
}

TEST(Completion, OffersEveryOptionThatTheHelpShows) {
  const std::string all = "\n" + complete({"run", "-"});
  for (const auto& row : option_table())
    EXPECT_EQ(all.find("\n" + row.name() + "\t" + row.description + "\n") == std::string::npos,
              std::string(row.group).empty())
        << row.name();
}

TEST(Completion, OffersTheValuesOfAnOption) {
  EXPECT_EQ(complete({"run", "--rdzv-backend", ""}), "static\t\nc10d\t\nparallel\t\nredis\t\netcd\t\nfile\t\n");
  EXPECT_EQ(complete({"run", "--rdzv-backend", "r"}), "redis\t\n");
  EXPECT_THAT(complete({"run", "-r", ""}), IsEmpty()) << "files may stand there";
  EXPECT_THAT(complete({"run", "--standalone", ""}), IsEmpty());
}

TEST(Completion, OffersSubcommandsAndTheirOptions) {
  EXPECT_THAT(complete({"store", ""}), StartsWith("serve\t"));
  EXPECT_EQ(complete({"store", "--store", "unix:/x", "ls", "--v"}), "--values\t\n");
  EXPECT_THAT(complete({"store", "watch", "--"}), HasSubstr("--interval"));
  EXPECT_THAT(complete({"store", "get", "--"}), Not(HasSubstr("--interval")));
}

TEST(Completion, WritesAScriptForEachShell) {
  for (const char* shell : {"bash", "zsh", "fish"})
    EXPECT_THAT(completion_script(shell, "/bin/muster").value(), HasSubstr("'/bin/muster' completion words"));
  EXPECT_THAT(completion_script("tcsh", "").error().message, HasSubstr("bash, zsh or fish, not 'tcsh'"));
}

}  // namespace
}  // namespace muster
