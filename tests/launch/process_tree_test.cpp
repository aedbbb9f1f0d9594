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

// Starts a child that runs until it is killed.
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
    const pid_t child = fork_child();
    (void)!::write(ends[1], &child, sizeof child);
    char ignored = 0;
    (void)!::read(done[0], &ignored, 1);  // the child belongs to this thread while the thread lives
  });
  ASSERT_EQ(::read(ends[0], &of_thread, sizeof of_thread), static_cast<ssize_t>(sizeof of_thread));
  EXPECT_THAT(child_pids(), testing::UnorderedElementsAre(parent, of_thread));
  ASSERT_EQ(::write(done[1], "", 1), 1);
  thread.join();
  EXPECT_THAT(child_pids(), testing::UnorderedElementsAre(parent, of_thread));
  ::kill(grandchild, SIGKILL);
  // Also the grandchild, if an earlier test has made this process adopt orphans.
  EXPECT_TRUE(kill_all_children(Deadline::after(std::chrono::seconds(60))));
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

// Waits until `pid` can be reaped, and does not reap it.
void await_end(pid_t pid) {
  siginfo_t info{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT), 0);
}

TEST(ReapChildren, ListsSignalledChildrenFirst) {
  const pid_t exited = ::fork();
  if (exited == 0) ::_exit(3);
  const pid_t killed = fork_child(), running = fork_child();
  ::kill(killed, SIGKILL);
  await_end(exited);
  await_end(killed);
  const auto reaped = reap_children();
  ASSERT_EQ(reaped.ended.size(), 2u);
  EXPECT_EQ(reaped.ended[0].pid, killed);
  EXPECT_EQ(WTERMSIG(reaped.ended[0].status), SIGKILL);
  EXPECT_EQ(reaped.ended[1].pid, exited);
  EXPECT_EQ(WEXITSTATUS(reaped.ended[1].status), 3);
  EXPECT_FALSE(reaped.none_left);
  ::kill(running, SIGKILL);
  reap_child(running);
  EXPECT_TRUE(reap_children().none_left);
}

TEST(ReapChildren, ReapsATreeOfOrphans) {
  adopt_orphans();
  sigset_t child_ended, before;
  sigemptyset(&child_ended);
  sigaddset(&child_ended, SIGCHLD);
  ASSERT_EQ(::sigprocmask(SIG_BLOCK, &child_ended, &before), 0);
  if (::fork() == 0) {
    if (::fork() == 0) fork_child();
    while (true) ::pause();
  }
  EXPECT_TRUE(kill_all_children(Deadline::after(std::chrono::seconds(60))));
  EXPECT_TRUE(reap_children().none_left);
  ::sigprocmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace
}  // namespace muster
