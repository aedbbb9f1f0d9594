#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "muster/io/loop.h"
#include "muster/io/stream.h"
#include "muster/store/protocol/outbox.h"

namespace muster {

/// A stream driven by a loop (edge-triggered), with an output queue. While the queue is longer than its limit, it reads
/// no input. If the peer then reads nothing for `stall_timeout`, the connection is lost. Only the loop's thread may use
/// an object. Must not be destroyed from its own handlers: use Loop::post().
class BufferedConnection {
 public:
  struct Options {
    size_t max_queue = 64 << 20;
    Duration stall_timeout = std::chrono::seconds(30);
  };
  struct Handlers {
    /// Takes input. A call without bytes means that over() has become false: continue with the input that was left.
    std::function<void(ByteView)> input;
    /// The last call to the handlers. The peer closed the connection, the stream broke, or the peer does not read.
    std::function<void(const Error&)> lost;
  };

  BufferedConnection(Loop& loop, std::unique_ptr<Stream> stream, Options options, Handlers handlers);
  ~BufferedConnection();
  BufferedConnection(const BufferedConnection&) = delete;
  BufferedConnection& operator=(const BufferedConnection&) = delete;

  Result<> start();
  /// The caller appends output here, then calls flush().
  Bytes& out() { return outbox_.tail(); }
  /// True while no input is read, because the connection is paused or too much output waits.
  bool over() const { return paused_ || outbox_.size() > options_.max_queue; }
  void pause(bool paused);
  void flush();
  /// Closes the stream. No handler is called after this.
  void close();

 private:
  void on_event(uint32_t events);
  void lose(const Error& why);
  void update_events();
  void continue_later();
  void arm_stall_timer();

  Loop& loop_;
  std::unique_ptr<Stream> stream_;
  Options options_;
  Handlers handlers_;
  Outbox outbox_;
  uint32_t watched_ = 0;
  bool open_ = false;
  bool hung_up_ = false;  // the kernel has reported the end of the peer's data, or an error
  bool paused_ = false;
  bool input_left_ = false;  // input was left because of over()
  std::optional<Loop::TimerId> stall_timer_;
  std::optional<Loop::TimerId> continue_timer_;  // for bytes that epoll does not report again
};

}  // namespace muster
