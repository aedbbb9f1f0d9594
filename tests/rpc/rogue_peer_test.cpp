// A peer that knows the secret but breaks the protocol loses its link, and nothing else happens.
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <latch>

#include "muster/io/loop.h"
#include "muster/rpc/directory.h"
#include "muster/rpc/wire.h"
#include "muster/transport/socket/socket_link.h"
#include "rpc/workers.h"

namespace muster::rpc::test {
namespace {

class RoguePeer : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(agent_->add_function("echo", echo, {}));
    const Deadline deadline = Deadline::after(kPatience);
    const auto record = parse_worker_record(*store_->get("rpc/rpc/name/a", deadline));
    const LinkIdentity identity{7, 1 << 30, "rpc/rpc", 0, {*store_->get("rpc/rpc/secret", deadline), nullptr}};
    const auto dial = connect_link(*loop_, *Address::parse(record->tcp_address), identity, agent_->self().id, deadline,
                                   [this](Result<std::unique_ptr<Link>> link) { link_ = std::move(*link); });
    ASSERT_TRUE(loop_->run_until([this] { return link_ != nullptr; }, deadline));
    link_->on_close([this](const Error& why) { closed_ = why; });
  }
  void TearDown() override {
    link_.reset();
    const auto caller = test::start(store_, options_for("caller", "tcp"));
    EXPECT_EQ(text(result_of(caller->call("a", "echo", text("other calls go on"), {}))), "other calls go on");
    EXPECT_TRUE(caller->shutdown(Deadline::after(kPatience)));
    EXPECT_TRUE(agent_->shutdown(Deadline::after(kPatience)));
  }

  void send(const Bytes& bytes) {
    const auto kept = std::make_shared<Bytes>(bytes);
    const ConstSegment segment{kept->data(), kept->size()};
    link_->send({&segment, 1}, [kept](const Result<>&) {});
  }
  void send(MessageHeader header, const std::string& name = "", const Message& message = {}) {
    BatchWriter batch;
    std::vector<Buffer> long_parts;
    ASSERT_TRUE(batch.add(header, name, message, long_parts));
    send(batch.take({}));
  }
  void send_hello() {
    Writer process;
    process.put<int32_t>(getpid()).put_string("");
    send({.kind = Kind::kHello, .flags = kWireVersion}, "rogue", Message{process.take(), {}});
  }
  /// A message for "echo", without its long parts.
  void send_header(const MessageHeader& header) {
    Bytes batch(kBatchHeaderBytes + sizeof header + 4);
    const auto bytes = static_cast<uint32_t>(batch.size() - kBatchHeaderBytes);
    std::memcpy(batch.data(), &bytes, sizeof bytes);
    std::memcpy(batch.data() + kBatchHeaderBytes, &header, sizeof header);
    std::memcpy(batch.data() + kBatchHeaderBytes + sizeof header, "echo", 4);
    send(batch);
  }
  static uint64_t resident_bytes() {
    uint64_t total = 0, resident = 0;
    std::ifstream("/proc/self/statm") >> total >> resident;
    return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  }
  void run_for(Duration time) {
    (void)loop_->run_until([] { return false; }, Deadline::after(time));
  }
  void read_and_drop() {
    const Segment into{dropped_.data(), dropped_.size()};
    link_->receive({&into, 1}, [this](const Result<>& received) {
      if (received) read_and_drop();
    });
  }
  /// Waits until the agent has closed the link, and returns its reason, which follows the results.
  Error close_reason() {
    read_and_drop();
    EXPECT_TRUE(loop_->run_until([this] { return closed_.has_value(); }, Deadline::after(kPatience)));
    return closed_.value_or(Error());
  }

  const std::shared_ptr<Store> store_ = memory_store();
  const std::shared_ptr<Agent> agent_ = test::start(store_, options_for("a", "tcp"));
  const std::unique_ptr<Loop> loop_ = Loop::create().value();
  std::unique_ptr<Link> link_;
  std::optional<Error> closed_;
  Bytes dropped_ = Bytes(size_t{1} << 20);
};

TEST_F(RoguePeer, SendsRandomBytes) {
  send(Bytes(4096, 0xa5));
  EXPECT_EQ(close_reason().code, ErrorCode::kProtocol);
}

TEST_F(RoguePeer, AnnouncesABatchOfTwoGigabytes) {
  Bytes header(kBatchHeaderBytes);
  const uint32_t bytes = 2'000'000'000;
  std::memcpy(header.data(), &bytes, sizeof bytes);
  send(header);
  EXPECT_EQ(close_reason().code, ErrorCode::kProtocol);
}

TEST_F(RoguePeer, CallsBeforeItsHello) {
  send({.kind = Kind::kRequest, .id = 1}, "echo");
  const Error why = close_reason();
  EXPECT_EQ(why.code, ErrorCode::kProtocol);
  EXPECT_NE(why.message.find("did not send its name first"), std::string::npos) << why.message;
}

TEST_F(RoguePeer, SpeaksAnotherVersion) {
  send({.kind = Kind::kHello, .flags = kWireVersion + 1}, "rogue");
  const Error why = close_reason();
  EXPECT_EQ(why.code, ErrorCode::kMismatch);
  EXPECT_NE(why.message.find("install one muster everywhere"), std::string::npos) << why.message;
}

TEST_F(RoguePeer, RepeatsARequest) {
  send_hello();
  send({.kind = Kind::kRequest, .id = 5}, "echo");
  send({.kind = Kind::kRequest, .id = 5}, "echo");
  const Error why = close_reason();
  EXPECT_EQ(why.code, ErrorCode::kProtocol);
  EXPECT_NE(why.message.find("sent request 5 after request 5"), std::string::npos) << why.message;
}

TEST_F(RoguePeer, AnswersWithoutACall) {
  send_hello();
  send({.kind = Kind::kReply, .id = 1});
  EXPECT_EQ(close_reason().code, ErrorCode::kProtocol);
}

TEST_F(RoguePeer, AnnouncesALongerPartThanTheCap) {
  send_hello();
  send_header({.kind = Kind::kRequest, .name_bytes = 4, .id = 1, .head_bytes = uint64_t{1} << 50});
  EXPECT_EQ(close_reason().code, ErrorCode::kProtocol);
}

/// Only the header is sent. The memory is used as the head arrives.
TEST_F(RoguePeer, AnnouncesALongHead) {
  send_hello();
  const uint64_t before = resident_bytes();
  send_header({.kind = Kind::kRequest, .name_bytes = 4, .id = 1, .head_bytes = uint64_t{2} << 30});
  run_for(300ms);
  EXPECT_LT(resident_bytes(), before + (uint64_t{256} << 20));
}

/// Only the header is sent. Before the hello, no memory is allocated for long parts.
TEST_F(RoguePeer, AnnouncesALongHello) {
  send({.kind = Kind::kHello, .flags = kWireVersion}, "rogue", Message{Bytes(kMaxInlineBytes + 1), {}});
  EXPECT_EQ(close_reason().code, ErrorCode::kProtocol);
}

TEST_F(RoguePeer, AnnouncesALongCancel) {
  send_hello();
  send({.kind = Kind::kCancel, .id = 1}, "", Message{Bytes(kMaxInlineBytes + 1), {}});
  EXPECT_EQ(close_reason().code, ErrorCode::kProtocol);
}

/// Empty segments, each of which needs memory here.
TEST_F(RoguePeer, SendsMoreBytesThanAWindow) {
  const auto gate = std::make_shared<std::latch>(1);
  ASSERT_TRUE(agent_->add_function("waits", [gate](Request, Responder) { gate->wait(); }, {}));
  send_hello();
  const Message large{{}, std::vector<Buffer>(kMaxSegments)};
  const uint64_t started = EndpointOptions().max_handlers;  // they need no room
  for (uint64_t id = 1; id <= kMaxBytesInFlight / large.footprint() + started + 1; ++id) {
    send({.kind = Kind::kRequest, .id = id, .timeout_us = 60'000'000}, "waits", large);
  }
  const Error why = close_reason();
  gate->count_down();
  EXPECT_EQ(why.code, ErrorCode::kProtocol);
  EXPECT_NE(why.message.find("without waiting for room"), std::string::npos) << why.message;
}

/// The timeout of a request does not start again when its long parts have arrived.
TEST_F(RoguePeer, SendsALongPartLate) {
  std::atomic<int> late = 0;
  std::latch after(1);
  ASSERT_TRUE(agent_->add_function("late", [&](Request, Responder) { ++late; }, {}));
  ASSERT_TRUE(agent_->add_function("after", [&](Request, Responder) { after.count_down(); }, {}));
  send_hello();
  const Bytes head(kMaxInlineBytes + 1);
  send({.kind = Kind::kRequest, .id = 1, .timeout_us = 100'000}, "late", Message{head, {}});
  run_for(300ms);
  send(head);
  send({.kind = Kind::kRequest, .id = 2, .timeout_us = 60'000'000}, "after");
  run_for(100ms);
  after.wait();
  EXPECT_EQ(late, 0);
}

/// Its functions start only as fast as it reads, and go on when it does.
TEST_F(RoguePeer, DoesNotReadItsResults) {
  constexpr int kCalls = 200;
  std::atomic<int> runs = 0;
  const Buffer result = Buffer::allocate(size_t{16} << 20);
  ASSERT_TRUE(agent_->add_function("large",
                                   [&](Request, Responder responder) {
                                     ++runs;
                                     responder.reply(Message{{}, {result}});
                                   },
                                   {}));
  send_hello();
  for (uint64_t id = 1; id <= kCalls; ++id) {
    send({.kind = Kind::kRequest, .id = id, .timeout_us = 600'000'000}, "large");
  }
  run_for(500ms);
  EXPECT_GT(runs, 0);
  EXPECT_LT(runs, 40);
  read_and_drop();
  EXPECT_TRUE(loop_->run_until([&] { return runs == kCalls; }, Deadline::after(kPatience)));
}

TEST_F(RoguePeer, SendsRequestsWithoutEnd) {
  const auto gate = std::make_shared<std::latch>(1);
  ASSERT_TRUE(agent_->add_function("waits",
                                   [gate](Request, Responder responder) {
                                     gate->wait();
                                     responder.reply({});
                                   },
                                   {}));
  send_hello();
  const uint64_t started = EndpointOptions().max_handlers;  // they need no room
  for (uint64_t id = 1; id <= kMaxCallsInFlight + started + 1; ++id) {
    send({.kind = Kind::kRequest, .id = id, .timeout_us = 60'000'000}, "waits");
  }
  const Error why = close_reason();
  gate->count_down();
  EXPECT_EQ(why.code, ErrorCode::kProtocol);
  EXPECT_NE(why.message.find("without waiting for room"), std::string::npos) << why.message;
}

/// A caller that is cut off while it dials its two connections can dial again.
TEST(IncompleteCaller, MayDialAgain) {
  const std::shared_ptr<Store> store = memory_store();
  auto options = options_for("a", "tcp");
  options.tcp_streams = 2;
  const auto agent = test::start(store, options);
  const Deadline deadline = Deadline::after(kPatience);
  const auto record = parse_worker_record(*store->get("rpc/rpc/name/a", deadline));
  const auto loop = Loop::create().value();
  std::vector<std::unique_ptr<Link>> links;
  std::optional<Error> refused;
  const auto dial = [&](int subflow) {
    const size_t before = links.size();
    const LinkIdentity identity{7,           1 << 30, "rpc/rpc", 0, {*store->get("rpc/rpc/secret", deadline), nullptr},
                                {subflow, 2}};
    const auto attempt = connect_link(*loop, *Address::parse(record->tcp_address), identity, agent->self().id, deadline,
                                      [&](Result<std::unique_ptr<Link>> link) { links.push_back(std::move(*link)); });
    ASSERT_TRUE(loop->run_until([&] { return links.size() > before; }, deadline));
    links.back()->on_close([&](const Error& why) { refused = why; });
  };
  dial(0);
  links.clear();
  (void)loop->run_until([] { return false; }, Deadline::after(100ms));
  dial(0);
  dial(1);
  (void)loop->run_until([&] { return refused.has_value(); }, Deadline::after(100ms));
  EXPECT_FALSE(refused) << refused->to_string();
  links.clear();
  EXPECT_TRUE(agent->shutdown(deadline));
}

/// Cancels what it never sent; that is harmless.
TEST_F(RoguePeer, CancelsUnknownCalls) {
  send_hello();
  for (uint64_t id = 0; id < 100; ++id) send({.kind = Kind::kCancel, .id = id});
  send({.kind = Kind::kReply});
  EXPECT_EQ(close_reason().code, ErrorCode::kProtocol);
}

}  // namespace
}  // namespace muster::rpc::test
