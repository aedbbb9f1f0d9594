#pragma once

#include <string>
#include <string_view>

#include "muster/base/bytes.h"

namespace muster {

/// Both ends prove to each other that they know the job's secret, before anything else is parsed. This class uses no
/// socket: the caller feeds it bytes and sends its output. The grammar is at the head of handshake.cpp. Each side sends
/// a nonce, then HMAC-SHA256(secret, role || both nonces || its hello). So a proof cannot be replayed or reflected, and
/// it authenticates the hello, too.
class Handshake {
 public:
  enum class Side : uint8_t { kClient, kServer };

  /// `hello` describes this side to the other one, at most 4 KiB. Each protocol defines its own.
  Handshake(Side side, ByteView secret, ByteView hello);
  static constexpr size_t kMaxHello = 4096;

  /// Why a server refuses a client. Sent on the wire: append only.
  enum class Refusal : uint8_t {
    kWrongSecret = 1,
    kMalformed = 2,
    kWrongUser = 3,
    kTlsRequired = 4,
    kFull = 5,  ///< no file descriptor is left
    kBusy = 6,  ///< too many connections are in their handshake: the client should try again
  };
  /// The bytes that a server sends first to a client that it refuses without a handshake.
  static Bytes refuse(Refusal reason);
  /// The server ends the handshake in any state. take_output() then returns the reason for the client.
  void reject(Refusal reason);

  /// Takes bytes from the peer. Returns how many it used: bytes that follow the handshake belong to the caller. A wrong
  /// secret is kAuthentication. Another protocol is kProtocol, and the message names it ("speaks HTTP", "speaks TLS",
  /// "a different version of muster").
  Result<size_t> feed(ByteView bytes);
  /// Bytes to send now (may be empty). After a failed feed(), they tell the peer the reason.
  Bytes take_output() { return output_.take(); }
  bool done() const { return state_ == State::kDone; }
  /// The peer's hello; valid once done().
  const Bytes& peer_hello() const { return peer_hello_; }

 private:
  enum class State : uint8_t { kAwaitNonce, kAwaitProof, kAwaitVerdict, kDone, kFailed };

  Result<> advance();
  Result<> on_greeting();
  Result<> on_proof();
  Result<> check_magic() const;
  Result<> check_version() const;
  Result<size_t> wanted() const;
  void send_greeting();
  void send_proof();
  Bytes proof_of(Side side, ByteView hello) const;
  Error refused(uint8_t reason) const;

  Side side_;
  State state_ = State::kAwaitNonce;
  Bytes secret_, hello_, peer_hello_, nonce_, peer_nonce_, input_;
  Writer output_;
};

/// A fresh 32-byte secret.
Bytes generate_secret();
/// kInvalidArgument if a secret has fewer than 16 bytes, because it can be guessed. An empty secret means that there is
/// none, and is allowed. The message begins with `source`: "MUSTER_SECRET", "--secret-file job.hex".
Result<> check_secret(ByteView secret, std::string_view source);
/// Reads a secret in hex, and checks it.
Result<Bytes> parse_secret(std::string_view hex, std::string_view source);
/// The secret in MUSTER_SECRET, in hex. Empty if the variable is not set.
Result<Bytes> secret_from_environment();

}  // namespace muster
