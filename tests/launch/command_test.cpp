#include "muster/launch/command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Commands : public ::testing::Test {
 protected:
  Commands() { folder_ = ::mkdtemp(name_.data()); }
  ~Commands() override { std::filesystem::remove_all(folder_); }

  std::string file(const std::string& name, mode_t mode) {
    const std::string path = folder_ + "/" + name;
    std::ofstream(path) << "x";
    ::chmod(path.c_str(), mode);
    return path;
  }
  RunOptions program(const std::string& path) {
    RunOptions options;
    options.target = RunOptions::Target::kProgram;
    options.program = path;
    options.arguments = {"a", "--b"};
    return options;
  }

  std::string name_ = ::testing::TempDir() + "commands-XXXXXX";
  std::string folder_;
};

TEST_F(Commands, PythonIsTheConfiguredOne) {
  const std::string python = file("my-python", 0755);
  EXPECT_EQ(find_python("muster", {{"MUSTER_PYTHON", python}}).value(), python);
  const auto missing = find_python("muster", {{"MUSTER_PYTHON", folder_ + "/none"}});
  ASSERT_FALSE(missing);
  EXPECT_THAT(missing.error().message, HasSubstr("MUSTER_PYTHON"));
}

TEST_F(Commands, PythonBesideTheProgramComesBeforeThePath) {
  const std::string python = file("python3", 0755);
  EXPECT_EQ(find_python(folder_ + "/muster", {{"PATH", "/usr/bin"}}).value(), python);
  file("muster", 0755);
  EXPECT_EQ(find_python("muster", {{"PATH", folder_}}).value(), python);
}

TEST_F(Commands, APythonBesideTheProgramThatCannotRunIsNamed) {
  const std::string beside = folder_ + "/python3", secret = folder_ + "/secret";
  std::filesystem::create_symlink(folder_ + "/none", beside);
  const auto dangling = find_python(folder_ + "/muster", {{"PATH", "/usr/bin"}});
  ASSERT_FALSE(dangling);
  EXPECT_EQ(dangling.error().message, "cannot start '" + beside + "': no such file");

  std::filesystem::create_directory(secret);
  file("secret/python3", 0755);
  ::chmod(secret.c_str(), 0);
  std::filesystem::remove(beside);
  std::filesystem::create_symlink(secret + "/python3", beside);
  ::chmod(folder_.c_str(), 0755);
  const bool root = ::geteuid() == 0;  // who may enter every directory
  if (root) {
    ASSERT_EQ(::seteuid(65534), 0);
  }
  const auto unreadable = find_python(folder_ + "/muster", {{"PATH", "/usr/bin"}});
  if (root) {
    ASSERT_EQ(::seteuid(0), 0);
  }
  ::chmod(secret.c_str(), 0700);
  ASSERT_FALSE(unreadable);
  EXPECT_THAT(unreadable.error().message, HasSubstr(beside + "': this user may not enter a directory"));
}

TEST_F(Commands, AProgramIsNoScript) {
  RunOptions options;
  options.program = "/proc/self/exe";
  const auto refused = worker_command(options, "muster", {{"MUSTER_PYTHON", file("python3", 0755)}});
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message, HasSubstr("it is not a Python script; give --no-python"));
}

TEST_F(Commands, AScriptRunsUnderPython) {
  const std::string python = file("python3", 0755);
  RunOptions options;
  options.program = file("train.py", 0644);
  options.arguments = {"--lr", "1"};
  EXPECT_THAT(worker_command(options, "muster", {{"MUSTER_PYTHON", python}}).value(),
              ElementsAre(python, "-u", options.program, "--lr", "1"));
  options.target = RunOptions::Target::kModule;
  options.program = "package.train";
  EXPECT_THAT(worker_command(options, "muster", {{"MUSTER_PYTHON", python}}).value(),
              ElementsAre(python, "-u", "-m", "package.train", "--lr", "1"));
}

TEST_F(Commands, ARunPathGoesThroughRunpy) {
  RunOptions options;
  options.target = RunOptions::Target::kRunPath;
  options.program = file("train.py", 0644);
  const auto words = worker_command(options, "muster", {{"MUSTER_PYTHON", file("python3", 0755)}}).value();
  EXPECT_EQ(words[2], "-c");
  EXPECT_THAT(words[3], HasSubstr("runpy.run_path"));
  EXPECT_EQ(words[4], options.program);
}

TEST_F(Commands, CodeRunsWithoutAFile) {
  const std::string python = file("python3", 0755);
  RunOptions options;
  options.target = RunOptions::Target::kCode;
  options.program = "print(1)";
  options.arguments = {"-x"};
  EXPECT_THAT(worker_command(options, "muster", {{"MUSTER_PYTHON", python}}).value(),
              ElementsAre(python, "-u", "-c", "print(1)", "-x"));
}

TEST_F(Commands, AScriptFromStandardInputIsLoadedByCode) {
  RunOptions options;
  options.program = "-";
  options.from_stdin = true;
  const auto words = worker_command(options, "muster", {{"MUSTER_PYTHON", file("python3", 0755)}}).value();
  ASSERT_EQ(words.size(), 5U);
  EXPECT_EQ(words[2], "-c");
  EXPECT_EQ(words[4], "-");
  options.target = RunOptions::Target::kProgram;
  EXPECT_THAT(worker_command(options, "muster", {}).value(), ElementsAre("-"));
}

TEST_F(Commands, TheProgramItselfIsFoundAsItWasCalled) {
  const std::string path = file("muster", 0755);
  EXPECT_EQ(program_path(path, {}), path);
  EXPECT_EQ(program_path("muster", {{"PATH", folder_}}), path);
}

TEST_F(Commands, AScriptThatIsMissingIsNamed) {
  RunOptions options;
  options.program = folder_ + "/none.py";
  const auto command = worker_command(options, "muster", {{"MUSTER_PYTHON", "/bin/sh"}});
  ASSERT_FALSE(command);
  EXPECT_EQ(command.error().code, ErrorCode::kNotFound);
  EXPECT_THAT(command.error().message, HasSubstr(options.program));
  options.program = folder_;
  EXPECT_THAT(worker_command(options, "muster", {{"MUSTER_PYTHON", "/bin/sh"}}).error().message,
              HasSubstr("__main__.py"));
}

TEST_F(Commands, AScriptThatCannotBeInspectedIsNotMissing) {
  RunOptions options;
  options.program = folder_ + "/loop.py";
  std::filesystem::create_symlink("loop.py", options.program);
  const auto command = worker_command(options, "muster", {{"MUSTER_PYTHON", "/bin/sh"}});
  ASSERT_FALSE(command);
  EXPECT_EQ(command.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(command.error().message, HasSubstr("/loop.py': Too many levels of symbolic links"));
}

TEST_F(Commands, AProgramIsAPathOrIsSearchedFor) {
  const std::string path = file("tool", 0755);
  EXPECT_THAT(worker_command(program(path), "muster", {}).value(), ElementsAre(path, "a", "--b"));
  EXPECT_THAT(worker_command(program("tool"), "muster", {{"PATH", "/nowhere:" + folder_}}).value(),
              ElementsAre(path, "a", "--b"));
}

TEST_F(Commands, AProgramThatCannotRunIsNamedWithTheReason) {
  const auto missing = worker_command(program(folder_ + "/none"), "muster", {});
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
  EXPECT_THAT(missing.error().message, HasSubstr(folder_ + "/none"));
  EXPECT_THAT(worker_command(program(file("plain", 0644)), "muster", {}).error().message, HasSubstr("not executable"));
  EXPECT_THAT(worker_command(program(folder_), "muster", {}).error().message, HasSubstr("directory"));
  const auto unknown = worker_command(program("no-such-tool"), "muster", {{"PATH", folder_}});
  EXPECT_EQ(unknown.error().code, ErrorCode::kNotFound);
}

RunOptions with_words(const std::vector<std::string>& words) {
  const auto options = parse_run_options(words, {}, Machine{});
  EXPECT_TRUE(options) << options.error().message;
  return options.value_or(RunOptions{});
}

TEST(Programs, CodeIsTheFirstArgument) {
  const auto options = with_words({"-c", "--nproc-per-node=2", "print(1)", "-x"});
  EXPECT_EQ(options.target, RunOptions::Target::kCode);
  EXPECT_EQ(options.nproc, 2);
  EXPECT_EQ(options.program, "print(1)");
  EXPECT_THAT(options.arguments, ElementsAre("-x"));
}

TEST(Programs, ADashIsStandardInput) {
  const auto script = with_words({"--nproc-per-node=2", "-", "--lr", "1"});
  EXPECT_TRUE(script.from_stdin);
  EXPECT_EQ(script.target, RunOptions::Target::kScript);
  EXPECT_THAT(script.arguments, ElementsAre("--lr", "1"));
  EXPECT_TRUE(with_words({"--no-python", "-"}).from_stdin);
  EXPECT_FALSE(with_words({"-c", "-"}).from_stdin);
}

TEST(Programs, OtherHostsDoNotHaveThisStandardInput) {
  const auto options = parse_run_options({"--hosts=a,b", "-"}, {}, Machine{});
  ASSERT_FALSE(options);
  EXPECT_THAT(options.error().message, HasSubstr("standard input"));
}

}  // namespace
}  // namespace muster
