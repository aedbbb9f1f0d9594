#include "io/unauthenticated_peers.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "muster/io/connect/handshake.h"

namespace muster {
namespace {

constexpr uint32_t kHuge = 0x7fffffff;

Bytes text(std::string_view words) { return to_bytes(words); }
Bytes hex(std::string_view digits) { return *from_hex(digits); }
Bytes greeting() { return Handshake(Handshake::Side::kClient, {}, {}).take_output(); }

// A valid greeting, followed by bytes that no server can accept as a proof.
Bytes greeting_and(Bytes more) {
  Bytes all = greeting();
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace

struct UnauthenticatedPeers::Kind {
  enum End : uint8_t { kCloses, kResets, kStays };

  const char* name;
  std::vector<Bytes> words;  // one of them is sent
  End end;
};

const std::vector<UnauthenticatedPeers::Kind>& UnauthenticatedPeers::kinds() {
  static const std::vector<Kind> all = {
      {"port scans", {{}}, Kind::kCloses},
      {"port scans with a reset", {{}}, Kind::kResets},
      {"silent", {{}}, Kind::kStays},
      {"half greetings", {text("MUS"), text("M"), greeting()}, Kind::kStays},
      {"TLS hellos",
       {hex("16030100c8010000c40303"), hex("1603010200010001fc0303000102030405060708090a0b0c0d0e0f10"),
        hex("15030300020250")},
       Kind::kStays},
      {"HTTP",
       {text("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), text("POST /a HTTP/1.0\r\n"),
        text("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")},
       Kind::kCloses},
      {"other protocols",
       {text("SSH-2.0-x\r\n"), hex("00cef7853c0d01000000"), Bytes(4096, 0xff), Bytes(100)},
       Kind::kStays},
      {"lengths of 2 GB",
       {Writer().put(kHuge).put(uint8_t{1}).put(uint8_t{0}).put(uint16_t{0}).take(),
        greeting_and(Writer().put(kHuge).put(kHuge).take()),
        greeting_and(Writer().put(uint8_t{1}).put_raw(Bytes(32)).put(uint16_t{0xffff}).take()),
        hex("00cef7853c0102000000000000002f6b0000000001000000"), hex("00cef7853c01ffffffffffffff7f")},
       Kind::kStays},
      {"wrong proofs",
       {greeting_and(Writer().put(uint8_t{1}).put_raw(Bytes(32)).put(uint16_t{4}).put_raw(Bytes(4)).take())},
       Kind::kCloses},
  };
  return all;
}

UnauthenticatedPeers::UnauthenticatedPeers(std::vector<Address> targets, Options options)
    : targets_(std::move(targets)), options_(options), random_(options.seed), counts_(kinds().size()) {
  thread_ = std::thread([this] { run(); });
}

void UnauthenticatedPeers::stop() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
  open_.clear();
}

std::string UnauthenticatedPeers::summary() const {
  std::string result;
  for (size_t i = 0; i < counts_.size(); ++i) {
    result += fmt::format("{}{} {}", i == 0 ? "" : ", ", counts_[i], kinds()[i].name);
  }
  return result;
}

void UnauthenticatedPeers::run() {
  while (!stop_) connect_one();
}

void UnauthenticatedPeers::connect_one() {
  const size_t index = random_.below(kinds().size());
  const Kind& kind = kinds()[index];
  auto socket = start_connect(targets_[random_.below(targets_.size())]);
  if (!socket) return;
  pollfd entry{socket->get(), POLLOUT, 0};
  ::poll(&entry, 1, 100);  // without this wait, the connection could stay half open
  const Bytes& words = kind.words[random_.below(kind.words.size())];
  if (!words.empty()) (void)send(socket->get(), words.data(), words.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (kind.end == Kind::kResets) {
    const linger at_once{1, 0};
    setsockopt(socket->get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  }
  if (kind.end == Kind::kStays) open_.push_back(std::move(*socket));
  while (open_.size() > options_.max_open) open_.pop_front();
  ++counts_[index];
  ++accepted_;
}

void raise_descriptor_limit() {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

Duration soak_time() {
  const char* text = std::getenv("MUSTER_SOAK_SECONDS");
  int64_t seconds = 0;
  if (text != nullptr) std::from_chars(text, text + std::strlen(text), seconds);
  return std::chrono::seconds(seconds);
}

}  // namespace muster
