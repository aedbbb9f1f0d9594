// The process at the other end is killed. Every waiting operation must end with an error that names its rank.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "contract/link_contract.h"
#include "transport/link_kinds.h"

namespace muster {
namespace {

using testing::HasSubstr;

/// A child process that is rank 1. It runs `work` over a link to rank 0 until it is killed.
class Victim {
 public:
  using Work = std::function<void(Link&, Loop&)>;
  Victim(const ProcessLinkKind& kind, const std::string& address, const Work& work) {
    pid_ = fork();
    if (pid_ == 0) live(kind, address, work);
  }
  ~Victim() { kill_now(); }
  void kill_now() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  [[noreturn]] static void live(const ProcessLinkKind& kind, const std::string& address, const Work& work) {
    alarm(120);  // ends the child if the test does not
    auto loop = Loop::create();
    std::unique_ptr<Link> link;
    const auto dial =
        kind.connect(**loop, address, kind.identity(1), 0, test_deadline(), [&](Result<std::unique_ptr<Link>> made) {
          if (!made) _exit(1);
          link = std::move(*made);
        });
    (void)(*loop)->run_until([&] { return link != nullptr; }, test_deadline());
    if (link) work(*link, **loop);
    (void)(*loop)->run_until([] { return false; }, test_deadline());
    _exit(1);
  }

  pid_t pid_ = 0;
};

class LinkDeath : public testing::TestWithParam<ProcessLinkKind> {
 protected:
  void SetUp() override {
    loop_ = std::move(*Loop::create());
    auto made = GetParam().listen(*loop_, GetParam().identity(0),
                                  [this](std::unique_ptr<Link> link) { link_ = std::move(link); });
    ASSERT_TRUE(made);
    listener_ = std::move(*made);
  }
  void TearDown() override { link_.reset(); }

  void meet(const Victim::Work& work) {
    victim_ = std::make_unique<Victim>(GetParam(), listener_->address(), work);
    run_until([this] { return link_ != nullptr; });
  }
  void run_until(const std::function<bool()>& done) { ASSERT_TRUE(loop_->run_until(done, test_deadline())); }
  static void expect_lost(const Outcome& outcome) {
    ASSERT_EQ(outcome.calls, 1);
    ASSERT_FALSE(outcome.result);
    EXPECT_EQ(outcome.result.error().code, ErrorCode::kPeerLost);
    EXPECT_EQ(outcome.result.error().rank, 1);
    EXPECT_THAT(outcome.result.error().message, HasSubstr("rank 1 (host "));
  }

  std::unique_ptr<Loop> loop_;
  std::unique_ptr<Listener> listener_;
  std::unique_ptr<Link> link_;
  std::unique_ptr<Victim> victim_;
};

const Victim::Work kNothing = [](Link&, Loop&) {};

TEST_P(LinkDeath, EndsPendingAndLaterOperationsAndNamesTheRank) {
  meet(kNothing);
  int closes = 0;
  link_->on_close([&](const Error& why) { closes += why.code == ErrorCode::kPeerLost && why.rank == 1 ? 1 : 100; });
  const std::string text = pattern(size_t{24} << 20);
  std::string into(10, '\0');
  Outcome sent, received, sent_later, received_later;
  send_text(*link_, text, sent.record());
  receive_text(*link_, into, received.record());
  victim_->kill_now();
  run_until([&] { return sent.done() && received.done() && closes > 0; });
  send_text(*link_, "x", sent_later.record());
  receive_text(*link_, into, received_later.record());
  run_until([&] { return sent_later.done() && received_later.done(); });
  for (const Outcome* outcome : {&sent, &received, &sent_later, &received_later}) expect_lost(*outcome);
  EXPECT_EQ(closes, 1);
}

TEST_P(LinkDeath, IsNoticedWhenNothingIsPending) {
  meet(kNothing);
  int closes = 0;
  link_->on_close([&](const Error& why) { closes += why.rank == 1 ? 1 : 100; });
  victim_->kill_now();
  run_until([&] { return closes > 0; });
  EXPECT_EQ(closes, 1);
  EXPECT_FALSE(link_->is_open());
}

TEST_P(LinkDeath, IsNoticedInTheMiddleOfAMessage) {
  meet([](Link& link, Loop&) {
    static const std::string text = pattern(1000);
    send_text(link, text, [](Result<>) {});
  });
  std::string head(1000, '\0'), tail(1, '\0');
  Outcome first, second;
  receive_text(*link_, head, first.record());
  receive_text(*link_, tail, second.record());
  run_until([&] { return first.done(); });
  EXPECT_TRUE(first.ok());
  victim_->kill_now();
  run_until([&] { return second.done(); });
  expect_lost(second);
}

TEST_P(LinkDeath, DeliversDataThatWasSent) {
  int sent_all[2];  // signals that the victim's send has completed
  ASSERT_EQ(pipe2(sent_all, O_CLOEXEC), 0);
  meet([write_end = sent_all[1]](Link& link, Loop&) {
    static const std::string text = pattern(50'000);
    send_text(link, text, [write_end](Result<>) { (void)!write(write_end, "x", 1); });
  });
  close(sent_all[1]);
  std::string first(1, '\0'), rest(49'999, '\0'), behind(1, '\0');
  Outcome one, all, none;
  receive_text(*link_, first, one.record());
  run_until([&] { return one.done(); });
  EXPECT_EQ(read(sent_all[0], behind.data(), 1), 1);
  close(sent_all[0]);
  victim_->kill_now();
  for (int i = 0; i < 10; ++i) loop_->run_once(Deadline::after(10ms));
  receive_text(*link_, rest, all.record());
  receive_text(*link_, behind, none.record());
  run_until([&] { return none.done(); });
  EXPECT_TRUE(all.ok());
  EXPECT_TRUE(first + rest == pattern(50'000));
  expect_lost(none);
}

TEST_P(LinkDeath, IsNotASlowPeer) {
  meet([](Link& link, Loop& loop) {
    static std::string into(size_t{16} << 20, '\0');
    (void)loop.run_until([] { return false; }, Deadline::after(300ms));
    receive_text(link, into, [&link](Result<>) { send_text(link, "done", [](Result<>) {}); });
  });
  const std::string text = pattern(size_t{16} << 20);
  std::string answer(4, '\0');
  Outcome sent, received;
  send_text(*link_, text, sent.record());
  receive_text(*link_, answer, received.record());
  run_until([&] { return received.done(); });
  EXPECT_TRUE(sent.ok() && received.ok());
  EXPECT_EQ(answer, "done");
}

INSTANTIATE_TEST_SUITE_P(Process, LinkDeath, testing::ValuesIn(process_link_kinds()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace muster
