// A peer that authenticates correctly and then sends invalid bytes. The link must end with kProtocol for any invalid
// bytes.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <unistd.h>

#include "contract/link_contract.h"
#include "muster/base/random.h"
#include "muster/io/frame.h"
#include "muster/io/socket.h"
#include "muster/transport/link_frame.h"
#include "muster/transport/link_hello.h"
#include "muster/transport/shm/ring.h"
#include "transport/link_kinds.h"

namespace muster {
namespace {

Bytes frame(LinkFrame kind, ByteView payload = {}) { return encode_frame(static_cast<uint8_t>(kind), payload); }
Bytes header(uint32_t length, uint8_t kind, uint16_t reserved = 0) {
  return Writer().put(length).put(kind).put(uint8_t{0}).put(reserved).take();
}

class LinkRogue : public testing::TestWithParam<ProcessLinkKind> {
 protected:
  void SetUp() override {
    loop_ = std::move(*Loop::create());
    auto made = GetParam().listen(*loop_, GetParam().identity(0),
                                  [this](std::unique_ptr<Link> link) { link_ = std::move(link); });
    ASSERT_TRUE(made);
    listener_ = std::move(*made);
    const auto wire = GetParam().shm ? LinkHello::Wire::kShm : LinkHello::Wire::kSocket;
    connect(encode(make_hello(GetParam().identity(1), wire).value()));
  }
  void TearDown() override { link_.reset(); }

  void connect(Bytes hello) {
    DialOptions options{GetParam().credentials(), std::move(hello)};
    bool done = false;
    const auto attempt = dial(*loop_, Address::parse(listener_->address()).value(), std::move(options), test_deadline(),
                              [&](Result<Connection> connection) {
                                done = true;
                                ASSERT_TRUE(connection);
                                rogue_ = std::move(*connection);
                              });
    ASSERT_TRUE(loop_->run_until([&] { return done; }, test_deadline()));
  }
  void write(const Bytes& bytes) {
    const iovec piece{const_cast<uint8_t*>(bytes.data()), bytes.size()};
    const Result<size_t> written = rogue_.stream->write({&piece, 1});
    ASSERT_TRUE(written && *written == bytes.size());
  }
  /// Opens the link correctly. After this, `link_` is set.
  void open() {
    write(frame(LinkFrame::kOpen));
    ASSERT_TRUE(loop_->run_until([this] { return link_ != nullptr; }, test_deadline()));
    if (!GetParam().shm) return;
    Fd fd;
    region_.emplace(std::move(*RingRegion::create(fd)));
    ASSERT_TRUE(send_fd(rogue_.stream->fd(), fd.get(), test_deadline()));
  }
  Error close_error() {
    Outcome outcome;
    std::string into(100, '\0');
    receive_text(*link_, into, outcome.record());
    EXPECT_TRUE(loop_->run_until([&] { return outcome.done(); }, test_deadline()));
    return outcome.result ? Error{ErrorCode::kInternal, "it succeeded"} : outcome.result.error();
  }
  /// Sends `bytes` to a new link, which must end with kProtocol.
  void expect_refused(const Bytes& bytes) {
    open();
    write(bytes);
    const Error error = close_error();
    EXPECT_EQ(error.code, ErrorCode::kProtocol) << error.to_string();
    EXPECT_EQ(error.rank, 1);
    EXPECT_FALSE(link_->is_open());
  }

  std::unique_ptr<Loop> loop_;
  std::unique_ptr<Listener> listener_;
  std::unique_ptr<Link> link_;
  Connection rogue_;
  std::optional<RingRegion> region_;
};

TEST_P(LinkRogue, MayNotSendAnOversizedFrame) { expect_refused(header(0xffffffff, 2)); }
TEST_P(LinkRogue, MayNotUseReservedBits) { expect_refused(header(1, 2, 1)); }
TEST_P(LinkRogue, MayNotSendUnknownKindsOfFrames) { expect_refused(header(0, 99)); }
TEST_P(LinkRogue, MayNotOpenTwice) { expect_refused(frame(LinkFrame::kOpen)); }
TEST_P(LinkRogue, MayNotSendAnEmptyDataFrame) { expect_refused(frame(LinkFrame::kData)); }
TEST_P(LinkRogue, MayNotSendAnOversizedCloseReason) { expect_refused(frame(LinkFrame::kClose, Bytes(100'000))); }
TEST_P(LinkRogue, MayNotSendATruncatedCloseReason) { expect_refused(frame(LinkFrame::kClose, Bytes(3))); }
TEST_P(LinkRogue, MayNotAddDataToAShutdown) { expect_refused(frame(LinkFrame::kShutdown, Bytes(3))); }
TEST_P(LinkRogue, MayNotSendAnUnknownErrorCode) {
  expect_refused(
      frame(LinkFrame::kClose,
            Writer().put(uint8_t{200}).put(3).put(GroupPhase::kRunning).put_string("x").put_string("").take()));
}
TEST_P(LinkRogue, MayNotNameARankOutOfRange) {
  expect_refused(
      frame(LinkFrame::kClose,
            Writer().put(ErrorCode::kTimeout).put(8).put(GroupPhase::kRunning).put_string("x").put_string("").take()));
}
TEST_P(LinkRogue, MayNotSendAnUnknownPhase) {
  expect_refused(frame(LinkFrame::kClose,
                       Writer().put(ErrorCode::kTimeout).put(1).put(uint8_t{3}).put_string("x").put_string("").take()));
}
TEST_P(LinkRogue, MayNotSpeakAnotherProtocol) {
  expect_refused(to_bytes("GET / HTTP/1.1\r\nHost: example\r\nAccept: */*\r\n\r\n"));
}

TEST_P(LinkRogue, OnlyClosesTheLinkWithRandomBytes) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    link_.reset();
    const auto wire = GetParam().shm ? LinkHello::Wire::kShm : LinkHello::Wire::kSocket;
    connect(encode(make_hello(GetParam().identity(1), wire).value()));
    open();
    Random random(seed);
    Bytes rubbish(random.between(1, 2000));
    for (uint8_t& byte : rubbish) byte = static_cast<uint8_t>(random.below(random.chance(0.5) ? 6 : 256));
    write(rubbish);
    rogue_.stream.reset();
    region_.reset();
    Outcome outcome;
    std::string into(1 << 20, '\0');
    receive_text(*link_, into, outcome.record());
    ASSERT_TRUE(loop_->run_until([&] { return outcome.done(); }, test_deadline())) << "seed " << seed;
    EXPECT_FALSE(outcome.result) << "seed " << seed;
  }
}

/// The link reads the first piece of a payload ahead, and receives the second one directly. Then it must not look for
/// pings where the bytes that it had read ahead ended: there are bytes of a later payload, which look like pings.
TEST_P(LinkRogue, MaySendBytesThatLookLikePings) {
  if (GetParam().shm) GTEST_SKIP() << "its socket carries no data";
  open();
  const auto receive = [this](size_t bytes) {
    std::string into(bytes, '\0');
    Outcome outcome;
    receive_text(*link_, into, outcome.record());
    EXPECT_TRUE(loop_->run_until([&] { return outcome.done(); }, test_deadline()));
    EXPECT_TRUE(outcome.result) << outcome.result.error().to_string();
    return into;
  };
  const std::string first = pattern(10'000, 1), second = pattern(104, 2);
  const Bytes ping = frame(LinkFrame::kPing);
  Bytes pings;
  for (int i = 0; i < 1000; ++i) pings.insert(pings.end(), ping.begin(), ping.end());
  Bytes sent = frame(LinkFrame::kData, as_bytes(first));
  for (const ByteView payload : {as_bytes(second), as_bytes(second), ByteView(pings)}) {
    const Bytes next = frame(LinkFrame::kData, payload);
    sent.insert(sent.end(), next.begin(), next.end());
  }
  constexpr size_t kFirstPiece = 6000;
  write({sent.begin(), sent.begin() + kFirstPiece});
  while (loop_->run_once(Deadline::after(20ms))) {
  }
  EXPECT_EQ(receive(1000), first.substr(0, 1000));
  std::string rest(9000, '\0');
  Outcome outcome;
  receive_text(*link_, rest, outcome.record());
  EXPECT_FALSE(outcome.done());
  write({sent.begin() + kFirstPiece, sent.end()});
  ASSERT_TRUE(loop_->run_until([&] { return outcome.done(); }, test_deadline()));
  EXPECT_EQ(rest, first.substr(1000));
  EXPECT_EQ(receive(104), second);
  EXPECT_EQ(receive(104), second);
  EXPECT_EQ(to_bytes(receive(pings.size())), pings);
}

TEST_P(LinkRogue, MakesNoLinkWithoutAnOpenFrame) {
  for (const Bytes& instead : {frame(LinkFrame::kData, Bytes(10)), header(0xffffffff, 1), to_bytes("rubbish, rubbish"),
                               frame(LinkFrame::kOpen, Bytes(1))}) {
    const auto wire = GetParam().shm ? LinkHello::Wire::kShm : LinkHello::Wire::kSocket;
    connect(encode(make_hello(GetParam().identity(1), wire).value()));
    write(instead);
    while (loop_->run_once(Deadline::after(20ms))) {
    }
    EXPECT_EQ(link_, nullptr);
  }
}

TEST_P(LinkRogue, MakesNoLinkWithAnInvalidHello) {
  const Bytes good = encode(make_hello(GetParam().identity(1), LinkHello::Wire::kSocket).value());
  for (const Bytes& hello : {Bytes{}, to_bytes("store"), Bytes(good.begin(), good.end() - 1), Bytes(4000, 0xff)}) {
    connect(hello);
    while (loop_->run_once(Deadline::after(20ms))) {
    }
    EXPECT_EQ(link_, nullptr);
  }
}

INSTANTIATE_TEST_SUITE_P(Process, LinkRogue, testing::ValuesIn(process_link_kinds()),
                         [](const auto& info) { return info.param.name; });

/// Misbehaving peers that share memory.
class ShmRogue : public LinkRogue {
 protected:
  void open_with(Fd fd) {
    write(frame(LinkFrame::kOpen));
    ASSERT_TRUE(loop_->run_until([this] { return link_ != nullptr; }, test_deadline()));
    ASSERT_TRUE(send_fd(rogue_.stream->fd(), fd.get(), test_deadline()));
  }
};

TEST_P(ShmRogue, MayNotClaimToHaveWrittenMoreThanFits) {
  open();
  region_->control(0).tail.store(uint64_t{1} << 40);
  write(frame(LinkFrame::kDoorbell));
  EXPECT_EQ(close_error().code, ErrorCode::kProtocol);
}

TEST_P(ShmRogue, MayNotMoveItsWritePositionBack) {
  open();
  region_->control(0).tail.store(10);
  write(frame(LinkFrame::kDoorbell));
  Outcome outcome;
  std::string into(10, '\0');
  receive_text(*link_, into, outcome.record());
  ASSERT_TRUE(loop_->run_until([&] { return outcome.done(); }, test_deadline()));
  EXPECT_TRUE(outcome.ok());
  region_->control(0).tail.store(5);
  EXPECT_EQ(close_error().code, ErrorCode::kProtocol);
}

TEST_P(ShmRogue, MayNotClaimToHaveReadUnwrittenBytes) {
  open();
  region_->control(1).head.store(12345);
  while (loop_->run_once(Deadline::after(20ms))) {
  }
  Outcome outcome;
  send_text(*link_, "hello", outcome.record());
  ASSERT_TRUE(loop_->run_until([&] { return outcome.done(); }, test_deadline()));
  EXPECT_EQ(outcome.result.error().code, ErrorCode::kProtocol);
}

TEST_P(ShmRogue, MayNotShareMemoryThatCanShrink) {
  Fd fd(memfd_create("rogue", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(fd.get(), 2 * 4096 + 2 * kRingBytes), 0);
  open_with(std::move(fd));
  EXPECT_EQ(close_error().code, ErrorCode::kProtocol);
}

TEST_P(ShmRogue, MayNotShareMemoryOfAnotherSize) {
  Fd fd(memfd_create("rogue", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(fd.get(), 4096), 0);
  ASSERT_EQ(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  open_with(std::move(fd));
  EXPECT_EQ(close_error().code, ErrorCode::kProtocol);
}

TEST_P(ShmRogue, MayNotSendBytesInsteadOfMemory) {
  write(frame(LinkFrame::kOpen));
  ASSERT_TRUE(loop_->run_until([this] { return link_ != nullptr; }, test_deadline()));
  write(Bytes(1));
  EXPECT_EQ(close_error().code, ErrorCode::kProtocol);
}

std::vector<ProcessLinkKind> shm_kind() {
  std::vector<ProcessLinkKind> kinds = process_link_kinds();
  std::erase_if(kinds, [](const ProcessLinkKind& kind) { return !kind.shm; });
  return kinds;
}
INSTANTIATE_TEST_SUITE_P(Process, ShmRogue, testing::ValuesIn(shm_kind()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace muster
