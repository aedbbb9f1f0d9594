#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "muster/launch/agent/status_file.h"
#include "muster/launch/private_directories.h"

namespace muster {
namespace {

// True if the file exists and no living process has locked it.
bool looks_abandoned(const std::string& path) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat found {};
  return file && ::flock(file.get(), LOCK_SH | LOCK_NB) == 0 && ::fstat(file.get(), &found) == 0 && found.st_nlink > 0;
}

TEST(StatusFile, IsLockedBeforeItIsVisible) {
  std::string folder = "/tmp/muster-test-XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  const std::string path = folder + "/muster/job-" + std::to_string(::getpid()) + ".json";
  std::atomic<bool> over = false, abandoned = false;
  std::thread reader([&] {
    while (!over) abandoned = abandoned || looks_abandoned(path);
  });
  for (int i = 0; i < 3000; ++i) StatusFile({{"XDG_RUNTIME_DIR", folder}}, "job");
  over = true;
  reader.join();
  EXPECT_FALSE(abandoned) << "a reader that finds it so removes it";
  EXPECT_FALSE(std::filesystem::exists(path));
  std::filesystem::remove_all(folder);
}

TEST(StatusFile, NextAgentRemovesFilesOfDeadAgents) {
  std::string folder = "/tmp/muster-test-XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  const Environment environment = {{"XDG_RUNTIME_DIR", folder}};
  ASSERT_TRUE(user_directory(environment));
  const std::string dead = folder + "/muster/job-1.json", living = folder + "/muster/job-2.json";
  const std::string other = folder + "/muster/warm-1";
  for (const auto& path : {dead, living, other}) std::ofstream(path) << "{}";
  const Fd lock(::open(living.c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_EQ(::flock(lock.get(), LOCK_EX), 0);
  const StatusFile own(environment, "job");
  EXPECT_FALSE(std::filesystem::exists(dead));
  EXPECT_TRUE(std::filesystem::exists(living));
  EXPECT_TRUE(std::filesystem::exists(other));
  EXPECT_TRUE(std::filesystem::exists(folder + "/muster/job-" + std::to_string(::getpid()) + ".json"));
  std::filesystem::remove_all(folder);
}

TEST(UserDirectory, IsRemovedByItsLastUser) {
  std::string folder = "/tmp/muster-test-XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  const Environment environment = {{"XDG_RUNTIME_DIR", folder}};
  const std::string directory = folder + "/muster", other = directory + "/warm-1";
  EXPECT_EQ(user_directory(environment, /*create=*/false).value(), directory);
  EXPECT_FALSE(std::filesystem::exists(directory));
  {
    const StatusFile own(environment, "job");
    std::ofstream(other) << "";
  }
  EXPECT_TRUE(std::filesystem::exists(other));
  std::filesystem::remove(other);
  { const StatusFile own(environment, "job"); }
  EXPECT_FALSE(std::filesystem::exists(directory));
  {
    const auto lock = lock_user_directory(environment);
    ASSERT_TRUE(lock) << lock.error().message;
    remove_user_directory(directory);
    EXPECT_TRUE(std::filesystem::exists(directory)) << "the process with the lock is about to use it";
  }
  remove_user_directory(directory);
  EXPECT_FALSE(std::filesystem::exists(directory));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace muster
