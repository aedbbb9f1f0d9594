#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "muster/base/bytes.h"
#include "muster/base/error.h"

namespace muster {

/// Which connection of a link this is, and how many connections the link has (striped_link.h).
struct Subflow {
  int index = 0;
  int count = 1;
};

/// The process at the other end, as the handshake identified it.
struct Peer {
  Rank rank = kNoRank;
  std::string host;
  pid_t pid = 0;
  int size = 0;          ///< of its group; it may only blame ranks below this
  Subflow subflow = {};  ///< of the link that it dialed

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

/// Called exactly once on the owning loop, on success and on failure. May be called before send() or receive() returns.
using Completion = std::function<void(Result<>)>;

inline constexpr size_t kMaxControlMessage = 64;

/// Ordered bytes between two peers. Not thread-safe: only the thread that drives the owning Loop uses it.
///
/// Bytes have no message boundaries: a receive takes the next bytes that the peer sent, from one send or several.
/// Sends complete in order, and so do receives. The link uses the caller's buffers until the completion is called.
/// When the link ends for any reason, every pending and later operation gets the same error. The error names the peer's
/// rank. A peer's close(why) arrives as `why`, so that all ranks name the rank that failed first.
class Link {
 public:
  virtual ~Link() = default;  ///< closes an open link; pending operations get kAborted

  /// Sends inline the bytes that the peer can take now. The rest stays in the caller's buffers: the link does not copy
  /// it.
  virtual void send(std::span<const ConstSegment> from, Completion completion) = 0;
  virtual void receive(std::span<const Segment> into, Completion completion) = 0;
  /// Sends the reason to the peer, if the link still works, and ends every pending operation with `why`.
  virtual void close(Error why) = 0;
  /// The handler is called once, on the loop, when the link ends, even if nothing is pending. At most one handler.
  virtual void on_close(std::function<void(const Error&)> handler) = 0;

  /// Calls `pong` when the peer answers, or when it sends a ping of its own; never if the link ends first. Only a
  /// process that drives its loop answers. So a ping tells a peer that waits from a peer that is stopped or busy. A
  /// ping overtakes bytes that the peer does not receive yet, up to some KiB.
  virtual void ping(std::function<void()> pong) = 0;
  /// Sends up to kMaxControlMessage bytes outside the stream. Like a ping, they overtake the stream. A later message
  /// may replace one that is not sent yet, and delivery is not guaranteed. The peer's control handler gets them on its
  /// loop. There is at most one handler. Without a handler the message is dropped.
  virtual void send_control(ByteView bytes) = 0;
  virtual void set_control_handler(std::function<void(ByteView)> handler) = 0;

  virtual bool is_open() const = 0;
  virtual const Peer& peer() const = 0;
  /// "tcp", "unix", "shm", "sim".
  virtual const char* kind() const = 0;
};

/// Accepts links and gives each one to its handler. Destroying it stops accepting.
class Listener {
 public:
  virtual ~Listener() = default;
  /// The address to which a peer connects.
  virtual std::string address() const = 0;
  /// The last refused peer and the reason. Empty if no peer was refused.
  virtual std::string last_refusal() const = 0;
};
using LinkHandler = std::function<void(std::unique_ptr<Link>)>;
using ConnectHandler = std::function<void(Result<std::unique_ptr<Link>>)>;

}  // namespace muster
