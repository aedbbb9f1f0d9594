// The handshake. Version 1; every number is little-endian.
//
//   greeting := "MUSTER" version:u8 side:u8 nonce[32]          40 bytes; side: 0 client, 1 server, 2 refusal
//   proof    := kind:u8=1 mac[32] length:u16 hello[length]     length <= 4096
//   verdict  := proof | kind:u8=2 reason:u8
//
//   client -> server: greeting(0)
//   server -> client: greeting(1)         or greeting(2), whose nonce begins with a reason, and the end
//   client -> server: proof
//   server -> client: verdict             kind 2, and the end, if the client's proof is wrong or late
//
//   mac = HMAC-SHA256(secret, "client" | "server", the client's nonce, the server's nonce, hello)
//
// The layout of the first seven bytes never changes, so that each version can name the version of its peer. The label
// keeps a proof from being reflected, and the nonces keep it from being replayed. The peer's hello is available only
// after its mac was verified.
#include "muster/io/connect/handshake.h"

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/hmac.h>

#include <algorithm>
#include <cstdlib>
#include <tuple>
#include <utility>

#include "muster/base/check.h"
#include "muster/base/random.h"
#include "muster/io/connect/openssl.h"

namespace muster {
namespace {

constexpr std::string_view kMagic = "MUSTER";
constexpr uint8_t kVersion = 1;
constexpr uint8_t kRefusalSide = 2;
constexpr size_t kVersionOffset = 6;
constexpr size_t kSideOffset = 7;
constexpr size_t kNonceOffset = 8;
constexpr size_t kNonceBytes = 32;
constexpr size_t kGreetingBytes = kNonceOffset + kNonceBytes;
constexpr size_t kMacBytes = 32;
constexpr size_t kProofHeaderBytes = 1 + kMacBytes + 2;
constexpr size_t kRefusalBytes = 2;
constexpr size_t kMinSecretBytes = 16;  // 128 bits
enum Kind : uint8_t { kProof = 1, kRefused = 2 };

constexpr const char* kTls = "TLS, which is not set up at this end (MUSTER_TLS_CERT, MUSTER_TLS_KEY, MUSTER_TLS_CA)";

/// The first bytes of other protocols, and their names for messages.
using std::string_view_literals::operator""sv;
constexpr std::pair<std::string_view, const char*> kForeign[] = {
    {"GET "sv, "HTTP"},
    {"POST "sv, "HTTP"},
    {"HEAD "sv, "HTTP"},
    {"PUT "sv, "HTTP"},
    {"OPTIONS "sv, "HTTP"},
    {"PRI * HTTP"sv, "HTTP"},
    {"HTTP/"sv, "HTTP"},
    {"\x16\x03"sv, kTls},
    {"\x15\x03"sv, kTls},
    {"SSH-"sv, "SSH"},
    {"\x00\xCE\xF7\x85\x3C"sv, "PyTorch's TCPStore protocol"},
};

Bytes greeting(uint8_t side, ByteView nonce) {
  return Writer().put_raw(as_bytes(kMagic)).put(kVersion).put(side).put_raw(nonce).take();
}

Handshake::Side other(Handshake::Side side) {
  return side == Handshake::Side::kClient ? Handshake::Side::kServer : Handshake::Side::kClient;
}

uint16_t u16_at(const Bytes& bytes, size_t offset) {
  uint16_t value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

}  // namespace

Handshake::Handshake(Side side, ByteView secret, ByteView hello)
    : side_(side), secret_(secret.begin(), secret.end()), hello_(hello.begin(), hello.end()), nonce_(kNonceBytes) {
  MUSTER_CHECK(hello.size() <= kMaxHello, "a hello has at most 4096 bytes");
  fill_secure_random(nonce_);
  if (side_ == Side::kClient) send_greeting();
}

Bytes Handshake::refuse(Refusal reason) {
  Bytes nonce(kNonceBytes);
  nonce[0] = static_cast<uint8_t>(reason);
  return greeting(kRefusalSide, nonce);
}

void Handshake::reject(Refusal reason) {
  MUSTER_CHECK(side_ == Side::kServer && state_ != State::kDone,
               "only a server may reject a peer, and only during the handshake");
  const Bytes words = state_ == State::kAwaitProof ? Bytes{kRefused, static_cast<uint8_t>(reason)} : refuse(reason);
  if (state_ != State::kFailed) output_.put_raw(words);
  state_ = State::kFailed;
}

void Handshake::send_greeting() { output_.put_raw(greeting(static_cast<uint8_t>(side_), nonce_)); }

Bytes Handshake::proof_of(Side side, ByteView hello) const {
  keep_openssl();
  const bool client = side_ == Side::kClient;
  Writer message;
  message.put_raw(as_bytes(side == Side::kClient ? "client" : "server"));
  message.put_raw(client ? nonce_ : peer_nonce_).put_raw(client ? peer_nonce_ : nonce_).put_raw(hello);
  Bytes mac(kMacBytes);
  unsigned length = 0;
  static constexpr uint8_t kEmpty = 0;  // to OpenSSL, a null key is not an empty key
  const void* key = secret_.empty() ? &kEmpty : secret_.data();
  const auto* made = HMAC(EVP_sha256(), key, static_cast<int>(secret_.size()), message.bytes().data(),
                          message.bytes().size(), mac.data(), &length);
  MUSTER_CHECK(made != nullptr && length == kMacBytes, "HMAC-SHA256 failed");
  return mac;
}

void Handshake::send_proof() {
  output_.put(kProof).put_raw(proof_of(side_, hello_)).put(static_cast<uint16_t>(hello_.size())).put_raw(hello_);
}

Result<size_t> Handshake::feed(ByteView bytes) {
  size_t used = 0;
  while (state_ != State::kDone && used < bytes.size()) {
    if (state_ == State::kFailed) return fail(ErrorCode::kProtocol, "the handshake has failed already");
    const auto needed = wanted();
    if (needed) {
      const ByteView piece = bytes.subspan(used, std::min(*needed - input_.size(), bytes.size() - used));
      input_.insert(input_.end(), piece.begin(), piece.end());
      used += piece.size();
    }
    const auto moved = needed ? advance() : Result<>(tl::unexpected(needed.error()));
    if (!moved) {
      state_ = State::kFailed;
      return tl::unexpected(moved.error());
    }
  }
  return used;
}

// The length that input_ must reach before advance() can make the next decision.
Result<size_t> Handshake::wanted() const {
  if (state_ == State::kAwaitNonce) return kGreetingBytes;
  if (input_.empty()) return 1;
  if (input_[0] == kRefused && state_ == State::kAwaitVerdict) return kRefusalBytes;
  if (input_.size() < kProofHeaderBytes) return kProofHeaderBytes;
  return kProofHeaderBytes + u16_at(input_, 1 + kMacBytes);
}

Result<> Handshake::advance() {
  if (state_ == State::kAwaitNonce) return on_greeting();
  if (input_[0] == kRefused && state_ == State::kAwaitVerdict) {
    return input_.size() < kRefusalBytes ? Result<>() : Result<>(tl::unexpected(refused(input_[1])));
  }
  return on_proof();
}

Result<> Handshake::check_magic() const {
  const std::string_view text(reinterpret_cast<const char*>(input_.data()), input_.size());
  if (kMagic.starts_with(text.substr(0, kMagic.size()))) return {};
  for (const auto& [prefix, name] : kForeign) {
    if (text.starts_with(prefix)) return fail(ErrorCode::kProtocol, fmt::format("the peer speaks {}", name));
    if (prefix.starts_with(text)) return {};  // wait for more bytes, to name the protocol
  }
  const ByteView start = ByteView(input_).first(std::min<size_t>(input_.size(), 8));
  return fail(ErrorCode::kProtocol,
              fmt::format("the peer does not speak muster's protocol: it began with the bytes {}", to_hex(start)));
}

Result<> Handshake::check_version() const {
  if (input_.size() <= kVersionOffset || input_[kVersionOffset] == kVersion) return {};
  return fail(ErrorCode::kProtocol,
              fmt::format("the peer speaks a different version of muster: version {} of the protocol there, {} here; "
                          "install the same muster at both ends",
                          input_[kVersionOffset], kVersion));
}

Result<> Handshake::on_greeting() {
  for (const auto& checked : {check_magic(), check_version()}) {
    if (checked) continue;
    if (side_ == Side::kServer) send_greeting();  // so that a client of another protocol or version can report it
    return checked;
  }
  if (input_.size() < kGreetingBytes) return {};
  const uint8_t peer_side = input_[kSideOffset];
  if (side_ == Side::kClient && peer_side == kRefusalSide) return tl::unexpected(refused(input_[kNonceOffset]));
  if (peer_side != static_cast<uint8_t>(other(side_))) {
    return fail(ErrorCode::kProtocol,
                fmt::format("the peer is a {} too", side_ == Side::kClient ? "client" : "server"));
  }
  peer_nonce_.assign(input_.begin() + kNonceOffset, input_.end());
  input_.clear();
  if (side_ == Side::kServer) send_greeting();
  if (side_ == Side::kClient) send_proof();
  state_ = side_ == Side::kServer ? State::kAwaitProof : State::kAwaitVerdict;
  return {};
}

Result<> Handshake::on_proof() {
  const auto reject = [this](ErrorCode code, Refusal reason, std::string message) {
    if (side_ == Side::kServer) output_.put(kRefused).put(reason);
    return fail(code, std::move(message));
  };
  if (input_[0] != kProof) {
    return reject(ErrorCode::kProtocol, Refusal::kMalformed,
                  fmt::format("the peer sent {} where its proof was expected", input_[0]));
  }
  if (input_.size() < kProofHeaderBytes) return {};
  const size_t length = u16_at(input_, 1 + kMacBytes);
  if (length > kMaxHello) {
    return reject(
        ErrorCode::kProtocol, Refusal::kMalformed,
        fmt::format("the peer announces a hello of {} bytes where at most {} are allowed", length, kMaxHello));
  }
  if (input_.size() < kProofHeaderBytes + length) return {};
  const ByteView hello = ByteView(input_).subspan(kProofHeaderBytes);
  if (CRYPTO_memcmp(proof_of(other(side_), hello).data(), input_.data() + 1, kMacBytes) != 0) {
    return reject(
        ErrorCode::kAuthentication, Refusal::kWrongSecret,
        fmt::format("the peer does not know this job's secret{}", secret_.empty() ? " (empty at this end)" : ""));
  }
  peer_hello_.assign(hello.begin(), hello.end());
  if (side_ == Side::kServer) send_proof();
  input_.clear();
  state_ = State::kDone;
  return {};
}

Error Handshake::refused(uint8_t reason) const {
  using enum ErrorCode;
  static constexpr std::tuple<Refusal, ErrorCode, const char*> kMeanings[] = {
      {Refusal::kWrongSecret, kAuthentication, "the server refused this process: its job secret differs"},
      {Refusal::kWrongUser, kAuthentication, "the server refused this process: it belongs to another user"},
      {Refusal::kTlsRequired, kProtocol,
       "the server speaks TLS: set MUSTER_TLS_CERT, MUSTER_TLS_KEY and MUSTER_TLS_CA here too"},
      {Refusal::kFull, kResourceExhausted, "the server has no file descriptor left for another connection"},
      {Refusal::kBusy, kResourceExhausted, "the server has no room for this connection now"},
      {Refusal::kMalformed, kProtocol, "the server could not read this process's handshake"},
  };
  for (const auto& [refusal, code, text] : kMeanings) {
    if (refusal != static_cast<Refusal>(reason)) continue;
    const bool without_secret = refusal == Refusal::kWrongSecret && secret_.empty();
    return {code, std::string(text) + (without_secret ? " (this process has none)" : "")};
  }
  return {kProtocol, fmt::format("the server refused this process for reason {}, unknown here", reason)};
}

Bytes generate_secret() {
  Bytes secret(32);
  fill_secure_random(secret);
  return secret;
}

Result<> check_secret(ByteView secret, std::string_view source) {
  if (secret.empty() || secret.size() >= kMinSecretBytes) return {};
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("{}: a secret of {} bytes can be guessed; it takes {} or more: make one with `openssl rand "
                          "-hex 32`",
                          source, secret.size(), kMinSecretBytes));
}

Result<Bytes> parse_secret(std::string_view hex, std::string_view source) {
  auto secret = from_hex(hex);
  if (!secret) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{} takes the job's secret in hex, but the value is not hex", source));
  }
  MUSTER_TRY(check_secret(*secret, source));
  return secret;
}

Result<Bytes> secret_from_environment() {
  const char* hex = std::getenv("MUSTER_SECRET");
  return parse_secret(hex == nullptr ? "" : hex, "MUSTER_SECRET");
}

}  // namespace muster
