#include "muster/launch/process_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <thread>

namespace muster {
namespace {

// A child that stays until it is killed.
pid_t fork_child() {
  const pid_t pid = ::fork();
  if (pid == 0) {
    while (true) ::pause();
  }
  return pid;
}

std::vector<pid_t> child_pids() {
  std::vector<pid_t> pids;
  for (const auto& child : running_children()) pids.push_back(child.pid);
  return pids;
}

TEST(RunningChildren, ListsChildrenOfEveryThreadAndNoGrandchildren) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  const pid_t parent = ::fork();
  if (parent == 0) {
    const pid_t grandchild = fork_child();
    (void)!::write(ends[1], &grandchild, sizeof grandchild);
    while (true) ::pause();
  }
  pid_t grandchild = 0;
  ASSERT_EQ(::read(ends[0], &grandchild, sizeof grandchild), static_cast<ssize_t>(sizeof grandchild));
  pid_t of_thread = 0;
  std::array<int, 2> done{};
  ASSERT_EQ(::pipe(done.data()), 0);
  std::thread thread([&] {
    of_thread = fork_child();
    (void)!::write(ends[1], &of_thread, sizeof of_thread);
    char ignored = 0;
    (void)!::read(done[0], &ignored, 1);  // the child is this thread's as long as it lives
  });
  ASSERT_EQ(::read(ends[0], &of_thread, sizeof of_thread), static_cast<ssize_t>(sizeof of_thread));
  EXPECT_THAT(child_pids(), testing::UnorderedElementsAre(parent, of_thread));
  ASSERT_EQ(::write(done[1], "", 1), 1);
  thread.join();
  EXPECT_THAT(child_pids(), testing::UnorderedElementsAre(parent, of_thread));
  ::kill(grandchild, SIGKILL);
  for (const pid_t pid : {parent, of_thread}) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
  EXPECT_THAT(child_pids(), testing::IsEmpty());
  for (const int fd : {ends[0], ends[1], done[0], done[1]}) ::close(fd);
}

TEST(RunningChildren, ListsOrphansThatThisProcessAdopted) {
  adopt_orphans();
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  const pid_t parent = ::fork();
  if (parent == 0) {
    const pid_t orphan = fork_child();
    (void)!::write(ends[1], &orphan, sizeof orphan);
    ::_exit(0);
  }
  pid_t orphan = 0;
  ASSERT_EQ(::read(ends[0], &orphan, sizeof orphan), static_cast<ssize_t>(sizeof orphan));
  ASSERT_EQ(::waitpid(parent, nullptr, 0), parent);
  EXPECT_THAT(child_pids(), testing::ElementsAre(orphan));
  ::kill(orphan, SIGKILL);
  ::waitpid(orphan, nullptr, 0);
  for (const int fd : ends) ::close(fd);
}

}  // namespace
}  // namespace muster
