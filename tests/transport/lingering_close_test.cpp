#include "muster/transport/socket/lingering_close.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>

#include "store/manual_clock.h"

namespace muster {
namespace {

class LingeringCloseTest : public testing::Test {
 protected:
  LingeringCloseTest() {
    std::array<int, 2> ends{};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data()), 0);
    peer_.reset(ends[1]);
    linger(*loop_, plain_stream(Fd(ends[0])), Bytes(kBytes, 7));
  }
  // The number of bytes that the peer gets now; -1 after the end.
  ssize_t read() {
    std::array<uint8_t, 16 << 10> piece;
    const ssize_t n = ::read(peer_.get(), piece.data(), piece.size());
    while (loop_->poll()) continue;
    return n == 0 ? -1 : std::max<ssize_t>(n, 0);
  }

  static constexpr size_t kBytes = 1 << 20;
  ManualClock clock_;
  std::unique_ptr<Loop> loop_ = std::move(*Loop::create(clock_));
  Fd peer_;
};

TEST_F(LingeringCloseTest, SendsAllToASlowPeer) {
  size_t received = 0;
  for (ssize_t n = 0; (n = read()) >= 0; clock_.pass(std::chrono::milliseconds(100)))
    received += static_cast<size_t>(n);
  EXPECT_EQ(received, kBytes);
}

TEST_F(LingeringCloseTest, EndsWhenAPeerDoesNotRead) {
  EXPECT_GT(read(), 0);
  for (int i = 0; i < 2; ++i) clock_.pass(kLingerIdleTime), loop_->poll();
  EXPECT_FALSE(loop_->has_watches());
}

TEST_F(LingeringCloseTest, EndsWhenAPeerSendsForever) {
  for (Duration passed{}; passed <= kLingerTime + kLingerIdleTime; passed += std::chrono::seconds(1)) {
    (void)::send(peer_.get(), "x", 1, MSG_NOSIGNAL);
    while (loop_->poll()) continue;
    clock_.pass(std::chrono::seconds(1));
  }
  loop_->poll();
  EXPECT_FALSE(loop_->has_watches());
}

}  // namespace
}  // namespace muster
