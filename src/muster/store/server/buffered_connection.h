#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "muster/io/loop.h"
#include "muster/io/stream.h"
#include "muster/store/protocol/outbox.h"

namespace muster {

/// A stream driven by a loop (edge-triggered), with an output queue that has a cap. A peer whose queue is over the cap
/// is not listened to until it has read enough; one that takes nothing at all for `stall_timeout` meanwhile is given
/// up. Lives on the loop's thread. Must not be destroyed from within its own handlers: put that off with Loop::post().
class BufferedConnection {
 public:
  struct Options {
    size_t max_queue = 64 << 20;
    Duration stall_timeout = std::chrono::seconds(30);
  };
  struct Handlers {
    /// Bytes that arrived. Called with none when the channel is not over() any more: go on with what is left.
    std::function<void(ByteView)> input;
    /// Once, and the last call: the peer closed, the stream broke, or the peer does not read.
    std::function<void(const Error&)> lost;
  };

  BufferedConnection(Loop& loop, std::unique_ptr<Stream> stream, Options options, Handlers handlers);
  ~BufferedConnection();
  BufferedConnection(const BufferedConnection&) = delete;
  BufferedConnection& operator=(const BufferedConnection&) = delete;

  Result<> start();
  /// Append what is to be sent, then flush().
  Bytes& out() { return outbox_.tail(); }
  bool over() const { return paused_ || outbox_.size() > options_.max_queue; }
  /// Paused, it is over() until it is told to go on.
  void pause(bool paused);
  void flush();
  /// Closes the stream. No handler is called any more.
  void close();

 private:
  void on_event(uint32_t events);
  void lose(const Error& why);
  void update_watch();
  void go_on_later();
  void look_for_progress();

  Loop& loop_;
  std::unique_ptr<Stream> stream_;
  Options options_;
  Handlers handlers_;
  Outbox outbox_;
  uint32_t watched_ = 0;
  bool open_ = false;
  bool ending_ = false;  // the kernel has seen the peer's end
  bool paused_ = false;
  bool held_up_ = false;  // input was left because it was over
  std::optional<Loop::TimerId> stall_timer_;
  std::optional<Loop::TimerId> again_timer_;  // bytes are left where epoll does not see them
};

}  // namespace muster
