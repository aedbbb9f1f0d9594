#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "muster/base/bytes.h"
#include "muster/base/error.h"

namespace muster {

/// Which of a link's connections (striped_link.h) this is.
struct Subflow {
  int index = 0;
  int count = 1;
};

/// Who is at the other end, as it proved in the handshake.
struct Peer {
  Rank rank = kNoRank;
  std::string host;
  pid_t pid = 0;
  uint64_t generation = 0;
  std::string address;
  int size = 0;          ///< of its group: the ranks that it may blame are below
  Subflow subflow = {};  ///< of the link that it dialled

  /// "rank 3 (host b, pid 812)".
  std::string to_string() const;
};

struct ConstSegment {
  const void* data = nullptr;
  size_t bytes = 0;
};
struct Segment {
  void* data = nullptr;
  size_t bytes = 0;
};

/// Called once, on the owning loop, also on failure. May be called before send() or receive() returns.
using Completion = std::function<void(Result<>)>;

inline constexpr size_t kMaxControlMessage = 64;

/// Ordered bytes between two peers. Not thread-safe: used by whoever drives the owning Loop.
///
/// Bytes have no message bounds: a receive takes the next bytes that the peer sent, whatever sends they came from.
/// Sends complete in order, receives complete in order. Buffers are the caller's until the completion ran.
/// When the link ends, for whatever reason, every pending and later operation gets the same error, and it names the
/// peer's rank. A peer's close(why) arrives as `why`: blame travels, so that everyone names the rank that failed first.
class Link {
 public:
  virtual ~Link() = default;  ///< like close(kAborted) when still open

  /// Tries inline first; what the peer cannot take yet waits in the caller's buffers (nothing is copied or queued).
  virtual void send(std::span<const ConstSegment> from, Completion completion) = 0;
  virtual void receive(std::span<const Segment> into, Completion completion) = 0;
  /// Tells the peer why, as far as the link still carries anything, and ends every pending operation with `why`.
  virtual void close(Error why) = 0;
  /// Called once when the link ends, on the loop, even if nothing is pending: liveness. At most one handler.
  virtual void on_close(std::function<void(const Error&)> handler) = 0;

  /// Asks for a sign of life: `pong` is called once the peer's process has driven its loop and answered, or asked the
  /// same; never, if the link ends first. Tells a peer that waits from one that is stopped or busy elsewhere. It
  /// overtakes what the peer does not receive yet, up to some KiB.
  virtual void ping(std::function<void()> pong) = 0;
  /// Hands the peer up to kMaxControlMessage bytes beside the stream, which they overtake like a ping; a later note may
  /// take the place of one that has not gone yet, and none is promised to arrive. The peer's set_control_handler()
  /// handler gets it, on the loop; at most one handler, and nothing is kept for later.
  virtual void send_control(ByteView bytes) = 0;
  virtual void set_control_handler(std::function<void(ByteView)> handler) = 0;

  virtual bool is_open() const = 0;
  virtual const Peer& peer() const = 0;
  /// "tcp", "unix", "shm", "sim".
  virtual const char* kind() const = 0;
};

/// Accepts links; each new one is given to the handler that it was made with. Destroying it stops accepting.
class Listener {
 public:
  virtual ~Listener() = default;
  /// What a peer passes to connect.
  virtual std::string address() const = 0;
  /// Who was refused last, and why; empty while nobody was.
  virtual std::string last_refusal() const = 0;
};
using LinkHandler = std::function<void(std::unique_ptr<Link>)>;
using ConnectHandler = std::function<void(Result<std::unique_ptr<Link>>)>;

}  // namespace muster
