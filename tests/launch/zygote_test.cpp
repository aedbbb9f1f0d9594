#include "muster/launch/workers/zygote.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "muster/launch/private_directories.h"
#include "muster/launch/workers/warm.h"
#include "muster/launch/workers/zygote_program.h"

namespace muster {
namespace {

TEST(Zygote, ForksUnbufferedCommandsOfItsPython) {
  const std::string python = "/venv/bin/python3";
  EXPECT_TRUE(Zygote::can_fork(python, {python, "-u", "train.py", "--lr", "1"}));
  EXPECT_TRUE(Zygote::can_fork(python, {python, "-u", "-m", "package.train"}));
  EXPECT_TRUE(Zygote::can_fork(python, {python, "-u", "-c", "pass"}));
  EXPECT_FALSE(Zygote::can_fork(python, {python, "-u", "-m"}));
  EXPECT_FALSE(Zygote::can_fork(python, {python, "-u", "-O", "train.py"}));
  EXPECT_FALSE(Zygote::can_fork(python, {python, "train.py"}));
  EXPECT_FALSE(Zygote::can_fork(python, {"/other/python3", "-u", "train.py"}));
  EXPECT_FALSE(Zygote::can_fork(python, {"./train"}));
}

TEST(Zygote, CarriesTheTextOfEachModule) {
  const std::string& text = zygote_text();
  for (const char* name : {"__init__", "processes", "preload", "worker", "server", "warm", "main"})
    EXPECT_THAT(text, testing::HasSubstr(std::string("\0", 1) + name + std::string("\0", 1)));
}

TEST(Warm, DigestHasVariablesThatAForkCannotChange) {
  const WarmKey key{"/venv/bin/python3", {}, {{"PATH", "/bin"}, {"LD_LIBRARY_PATH", "/lib"}}};
  const std::string digest = warm_digest(key);
  const auto with = [&](const char* name, const char* value) {
    WarmKey other = key;
    other.environment[name] = value;
    return warm_digest(other);
  };
  for (const char* name : {"PATH", "RANK", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "TORCHELASTIC_RUN_ID", "MY_VARIABLE"})
    EXPECT_EQ(with(name, "x"), digest) << name;
  for (const char* name :
       {"LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "OMP_PROC_BIND", "TORCH_LOGS", "LANG", "ATEN_CPU_CAPABILITY"})
    EXPECT_NE(with(name, "x"), digest) << name;
  WarmKey other = key;
  other.python = "/other/bin/python3";
  EXPECT_NE(warm_digest(other), digest);
  other = key;
  other.preload = {"torchvision"};
  EXPECT_NE(warm_digest(other), digest);
}

TEST(Warm, RefusesADirectoryOpenToOtherUsers) {
  std::string base = testing::TempDir() + "muster-warm-XXXXXX";
  ASSERT_NE(::mkdtemp(base.data()), nullptr);
  const Environment environment = {{"XDG_RUNTIME_DIR", base}};
  const auto folder = user_directory(environment);
  ASSERT_TRUE(folder) << folder.error().message;
  EXPECT_EQ(*folder, base + "/muster");
  EXPECT_EQ(connect_warm(warm_path({"/bin/python3", {}, environment}).value()).error().code, ErrorCode::kNotFound);
  ::chmod(folder->c_str(), 0770);
  EXPECT_EQ(user_directory(environment).error().code, ErrorCode::kUnavailable);
  ::rmdir(folder->c_str());
  ASSERT_EQ(::symlink("/", folder->c_str()), 0);
  EXPECT_EQ(user_directory(environment).error().code, ErrorCode::kUnavailable);
  ::unlink(folder->c_str());
  ::rmdir(base.c_str());
}

}  // namespace
}  // namespace muster
