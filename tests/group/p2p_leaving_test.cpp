// The P2P engine of one rank of three. The test simulates a peer that leaves. The engine must touch an operation's
// memory only while the operation is pending.
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "group/ranks.h"
#include "muster/group/p2p/p2p_engine.h"
#include "muster/group/shutdown_errors.h"
#include "muster/io/socket.h"
#include "muster/transport/shm/shm_link.h"
#include "muster/transport/striped_link.h"

namespace muster {
namespace {

constexpr Rank kSelf = 0, kPeer = 1, kOther = 2;
constexpr int kRanks = 3;
constexpr size_t kLongBytes = size_t{16} << 20;  ///< more than a link buffers while its reader does not read
constexpr uint8_t kReused = 0xEE;                ///< occurs in no message and in no header

Deadline test_deadline() { return Deadline::after(std::chrono::seconds(60)); }

struct LinkCase {
  const char* name;
  Transport transport;
  int connections = 1;
};

/// Memory that faults on access once it is taken away.
class Memory {
 public:
  Memory() : data_(mmap(nullptr, kLongBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    EXPECT_NE(data_, MAP_FAILED);
  }
  ~Memory() { munmap(data_, kLongBytes); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  BufferView view() const { return {data_, kLongBytes, Dtype::kUint8}; }
  const uint8_t* bytes() const { return static_cast<const uint8_t*>(data_); }
  /// Like a caller that uses the memory for other data.
  void reuse() { std::memset(data_, kReused, kLongBytes); }
  void take_away() { EXPECT_EQ(mprotect(data_, kLongBytes, PROT_NONE), 0); }

 private:
  void* const data_;
};

class P2pLeaving : public testing::TestWithParam<LinkCase> {
 protected:
  void SetUp() override {
    const Transport transport = GetParam().transport;
    const auto address = p2p_->listen(fresh_address(), transport);
    ASSERT_TRUE(address) << address.error().to_string();
    address_ = *Address::parse(*address);
    const auto listen = transport == Transport::kShm ? listen_shm_links : listen_links;
    auto listener = listen(*listening_, fresh_address(), identity(kPeer),
                           [this](std::unique_ptr<Link> link) { add_accepted(std::move(link)); });
    ASSERT_TRUE(listener) << listener.error().to_string();
    listener_ = std::move(*listener);
    const std::string addresses[] = {address_.to_string(), listener_->address(), refusing_address()};
    std::vector<LinkTable::Endpoint> endpoints;
    for (Rank rank = 0; rank < kRanks; ++rank) {
      endpoints.push_back({"rank " + std::to_string(rank), {}, addresses[rank], transport});
    }
    p2p_->begin(endpoints);
  }
  void TearDown() override { p2p_->close(); }

  static LinkIdentity identity(Rank rank, int subflow = 0) {
    const Credentials credentials{to_bytes("a secret of the tests"), nullptr};
    return {rank, kRanks, "leaving", 0, credentials, {subflow, GetParam().connections}};
  }
  static Address fresh_address() {
    if (GetParam().transport == Transport::kTcp) return *Address::parse("127.0.0.1:0");
    static std::atomic<int> count = 0;
    return Address::unix_abstract("muster-leaving-test-" + std::to_string(getpid()) + "-" + std::to_string(count++));
  }
  /// An address at which nothing listens. For TCP, its port is taken, so that no other process listens there.
  std::string refusing_address() {
    const Address address = fresh_address();
    if (address.is_unix()) return address.to_string();
    refusing_.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::bind(refusing_.get(), address.raw(), address.raw_length()), 0);
    return local_address(refusing_.get())->to_string();
  }
  void add_accepted(std::unique_ptr<Link> link) {
    const Subflow subflow = link->peer().subflow;
    accepted_ = subflows_.add(std::move(link), subflow, [](const Error&) {});
  }

  static CallOptions async() { return {.timeout = std::chrono::seconds(60), .async = true}; }

  std::unique_ptr<Link> link_from(Rank rank) {
    const auto connect = GetParam().transport == Transport::kShm ? connect_shm_link : connect_link;
    std::unique_ptr<Link> made;
    SubflowSet subflows;
    std::vector<std::unique_ptr<Dial>> dials;
    for (int i = 0; i < GetParam().connections; ++i) {
      const LinkIdentity self = identity(rank, i);
      dials.push_back(connect(*dialing_, address_, self, kSelf, test_deadline(),
                              [&, subflow = self.subflow](Result<std::unique_ptr<Link>> link) {
                                made = subflows.add(std::move(link).value(), subflow, [](const Error&) {});
                              }));
    }
    EXPECT_TRUE(dialing_->run_until([&] { return made != nullptr; }, test_deadline()));
    return made;
  }
  static void send_message(Loop& loop, Link& link, const MessageHeader& header, ByteView data = {}) {
    const auto words = encode(header);
    const ConstSegment parts[] = {{words.data(), words.size()}, {data.data(), data.size()}};
    bool sent = false;
    link.send(parts, [&](const Result<>& result) { sent = result.has_value(); });
    ASSERT_TRUE(loop.run_until([&] { return sent; }, test_deadline()));
  }
  static MessageHeader receive_header(Loop& loop, Link& link) {
    std::array<uint8_t, kMessageHeaderBytes> words{};
    const Segment into{words.data(), words.size()};
    bool received = false;
    link.receive({&into, 1}, [&](const Result<>& result) { received = result.has_value(); });
    EXPECT_TRUE(loop.run_until([&] { return received; }, test_deadline()));
    return parse_message_header(words).value_or(MessageHeader{});
  }
  /// Reads all bytes on the link that rank 1 accepts, until the link ends. None of them may be kReused.
  void read_to_the_end() {
    Bytes bytes(size_t{64} << 10);
    const Segment into{bytes.data(), bytes.size()};
    bool ended = false, reused = false;
    std::function<void()> read = [&] {
      accepted_->receive({&into, 1}, [&](const Result<>& result) {
        reused = std::memchr(bytes.data(), kReused, bytes.size()) != nullptr;
        result && !reused ? read() : void(ended = true);
      });
    };
    const auto over = [&] { return ended || !listener_->last_refusal().empty(); };
    ASSERT_TRUE(listening_->run_until([&] { return accepted_ || over(); }, test_deadline()));
    if (accepted_) read();
    EXPECT_TRUE(listening_->run_until(over, test_deadline())) << "the link did not end";
    accepted_.reset();  // a receive that is still pending refers to the variables of this function
    EXPECT_FALSE(reused) << "the peer received memory that belongs to the caller again";
  }
  void leave(Rank rank) {
    const auto link = link_from(rank);
    ASSERT_TRUE(link);
    link->close(has_left("rank " + std::to_string(rank), rank));
  }
  Work receive(BufferView into, Rank from, uint32_t tag) { return p2p_->receive(std::move(into), from, tag, async()); }
  /// Rank 2 sends a message that a receive waits for, which shows that the P2P engine still works. The link was made
  /// early: nothing listens at rank 2's address, so the engine would soon conclude that rank 2 has left.
  void expect_alive(Link& other, const Work& from_other, uint32_t tag) {
    const uint8_t word = 7;
    send_message(*dialing_, other, {.kind = MessageKind::kEager, .tag = tag, .bytes = 1}, {&word, 1});
    const auto result = from_other.wait();
    EXPECT_TRUE(result) << result.error().to_string();
  }

  const std::shared_ptr<P2pEngine> p2p_ = *P2pEngine::create(identity(kSelf), GetParam().connections);
  const std::unique_ptr<Loop> dialing_ = *Loop::create();    ///< drives the links that the peers dial
  const std::unique_ptr<Loop> listening_ = *Loop::create();  ///< drives the link that rank 1 accepts
  Address address_;
  Fd refusing_;
  std::unique_ptr<Listener> listener_;
  SubflowSet subflows_;  ///< of a link that rank 1 accepts and that is not complete yet
  std::unique_ptr<Link> accepted_;
};

TEST_P(P2pLeaving, DoesNotReadTheBufferOfACompletedSend) {
  uint8_t word = 0;
  const Work other = receive({&word, 1, Dtype::kUint8}, kOther, 2);  // keeps the P2P engine's thread busy
  const auto other_link = link_from(kOther);
  ASSERT_TRUE(other_link);
  Memory memory;
  const Work send = p2p_->send(memory.view(), kPeer, 1, async());
  ASSERT_TRUE(listening_->run_until([this] { return accepted_ != nullptr; }, test_deadline()));
  const MessageHeader offer = receive_header(*listening_, *accepted_);
  ASSERT_EQ(offer.kind, MessageKind::kRequestToSend);
  send_message(*listening_, *accepted_, {.kind = MessageKind::kClearToSend, .id = offer.id});
  ASSERT_EQ(receive_header(*listening_, *accepted_).kind, MessageKind::kData);
  leave(kPeer);
  const auto result = send.wait();
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, ErrorCode::kLeft) << result.error().to_string();
  memory.reuse();
  read_to_the_end();
  expect_alive(*other_link, other, 2);
}

TEST_P(P2pLeaving, SendsNothingThatEndedBeforeItsLink) {
  uint8_t word = 0;
  const Work other = receive({&word, 1, Dtype::kUint8}, kOther, 2);
  const auto other_link = link_from(kOther);
  ASSERT_TRUE(other_link);
  Memory memory;
  const Work send = p2p_->send(memory.view(), kPeer, 1, async());
  leave(kPeer);
  ASSERT_FALSE(send.wait());
  memory.take_away();
  read_to_the_end();
  expect_alive(*other_link, other, 2);
}

TEST_P(P2pLeaving, ReceivesPendingMessagesFromALeavingPeer) {
  Memory memory;
  const Work any = receive(memory.view(), kAnyRank, 5);
  const auto link = link_from(kOther);
  send_message(*dialing_, *link, {.kind = MessageKind::kRequestToSend, .tag = 5, .id = 1, .bytes = kLongBytes});
  ASSERT_EQ(receive_header(*dialing_, *link).kind, MessageKind::kClearToSend);
  // Nothing listens at the peer's address any more, so the engine concludes that the peer has left.
  Memory unsent;
  ASSERT_FALSE(p2p_->send(unsent.view(), kOther, 1, async()).wait());
  uint8_t word = 0;
  const Work from_peer = receive({&word, 1, Dtype::kUint8}, kPeer, 6);
  leave(kPeer);
  ASSERT_FALSE(from_peer.wait());
  // Now all other ranks have left, but a message of one of them is still on its way.
  const Bytes data(kLongBytes, 3);
  send_message(*dialing_, *link, {.kind = MessageKind::kData, .id = 1, .bytes = kLongBytes}, data);
  const auto result = any.wait();
  ASSERT_TRUE(result) << result.error().to_string();
  EXPECT_TRUE(std::equal(data.begin(), data.end(), memory.bytes()));
}

INSTANTIATE_TEST_SUITE_P(Kinds, P2pLeaving,
                         testing::Values(LinkCase{"unix", Transport::kUnix}, LinkCase{"shm", Transport::kShm},
                                         LinkCase{"tcp", Transport::kTcp}, LinkCase{"striped", Transport::kTcp, 2}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace muster
