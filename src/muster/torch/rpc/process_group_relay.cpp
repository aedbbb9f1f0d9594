// The grammar. Two ranks send each other frames, in order, each in one message of kFrameBytes, and the bytes that do
// not fit there in a second message.
//
//   frame = header (FrameHeader), up to kInlineBytes bytes
//
// A stream is one connection. Either end may open streams, so a stream is known by its opener and its number.
#include "muster/torch/rpc/process_group_relay.h"

#include <sys/epoll.h>

#include <atomic>
#include <charconv>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "muster/base/log.h"
#include "muster/base/random.h"
#include "muster/io/connection.h"
#include "muster/io/loop.h"
#include "muster/io/socket.h"
#include "muster/io/stream.h"

namespace muster::rpc {
namespace {

constexpr size_t kFrameBytes = 1024;
constexpr size_t kMaxChunk = size_t{1} << 20;
/// The most bytes that wait to be sent to a rank, or to be written to the sockets of its streams.
constexpr size_t kMaxWaiting = 4 * kMaxChunk;
constexpr size_t kMaxStreams = 64;  ///< of one opener, between two ranks
constexpr Duration kHeartbeat = std::chrono::seconds(5);
/// How long a relay that ends waits for the other ranks.
constexpr Duration kByeTime = std::chrono::seconds(5);

enum class FrameKind : uint8_t {
  kOpen = 1,   ///< a new stream
  kData = 2,   ///< bytes of a stream
  kClose = 3,  ///< the end of a stream
  kAlive = 4,  ///< nothing: a backend may end a receive that waits for too long
  kBye = 5,    ///< the last frame. The receiver answers it with its own last frame
};

struct FrameHeader {
  FrameKind kind = FrameKind::kAlive;
  uint8_t opened_here = 0;  ///< the sender has opened the stream
  uint16_t unused = 0;
  uint32_t stream = 0;
  uint64_t bytes = 0;
};
constexpr size_t kInlineBytes = kFrameBytes - sizeof(FrameHeader);

struct Frame {
  FrameHeader header;
  Bytes bytes;
};

at::Tensor message(size_t bytes) { return torch::empty(static_cast<int64_t>(bytes), torch::kUInt8); }

/// Sends and receives frames. Blocks. The first error of the backend is final.
class FrameExchange {
 public:
  FrameExchange(c10::intrusive_ptr<c10d::Backend> backend, int peer) : backend_(std::move(backend)), peer_(peer) {}

  void send(const Frame& frame) const {
    at::Tensor first = message(kFrameBytes);
    auto* const to = first.data_ptr<uint8_t>();
    const size_t inline_bytes = std::min(frame.bytes.size(), kInlineBytes);
    std::memcpy(to, &frame.header, sizeof(FrameHeader));
    std::copy_n(frame.bytes.begin(), inline_bytes, to + sizeof(FrameHeader));
    send(first);
    if (frame.bytes.size() == inline_bytes) return;
    at::Tensor rest = message(frame.bytes.size() - inline_bytes);
    std::copy(frame.bytes.begin() + static_cast<std::ptrdiff_t>(inline_bytes), frame.bytes.end(),
              rest.data_ptr<uint8_t>());
    send(rest);
  }

  Frame receive() const {
    at::Tensor first = message(kFrameBytes);
    receive(first);
    Frame frame;
    const auto* const from = first.data_ptr<uint8_t>();
    std::memcpy(&frame.header, from, sizeof(FrameHeader));
    if (frame.header.bytes > kMaxChunk) throw std::runtime_error("a frame is too long");
    const size_t inline_bytes = std::min<size_t>(frame.header.bytes, kInlineBytes);
    frame.bytes.resize(frame.header.bytes);
    std::copy_n(from + sizeof(FrameHeader), inline_bytes, frame.bytes.begin());
    if (frame.bytes.size() == inline_bytes) return frame;
    at::Tensor rest = message(frame.bytes.size() - inline_bytes);
    receive(rest);
    std::copy_n(rest.data_ptr<uint8_t>(), rest.numel(),
                frame.bytes.begin() + static_cast<std::ptrdiff_t>(inline_bytes));
    return frame;
  }

 private:
  void send(at::Tensor& tensor) const {
    std::vector<at::Tensor> tensors{tensor};
    wait(backend_->send(tensors, peer_, kRelayTag));
  }
  void receive(at::Tensor& tensor) const {
    std::vector<at::Tensor> tensors{tensor};
    wait(backend_->recv(tensors, peer_, kRelayTag));
  }
  static void wait(const c10::intrusive_ptr<c10d::Work>& work) {
    if (!work->wait()) throw std::runtime_error("the backend has ended the operation");
  }

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const int peer_;
};

/// Frames that wait between the thread of the sockets and the threads of a rank. Thread-safe.
class FrameQueue {
 public:
  void push(Frame frame) {
    const std::lock_guard lock(mutex_);
    bytes_ += frame.bytes.size();
    frames_.push_back(std::move(frame));
    changed_.notify_all();
  }
  /// Empty if none comes within `patience`.
  std::optional<Frame> pop(Duration patience) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, patience, [this] { return !frames_.empty(); })) return std::nullopt;
    Frame frame = std::move(frames_.front());
    frames_.pop_front();
    return frame;
  }
  /// The bytes of a frame count until they are released. Returns true if there was no room, and now is some.
  bool release(size_t bytes) {
    const std::lock_guard lock(mutex_);
    const bool full = bytes_ >= kMaxWaiting;
    bytes_ -= bytes;
    changed_.notify_all();
    return full && bytes_ < kMaxWaiting;
  }
  bool is_full() {
    const std::lock_guard lock(mutex_);
    return bytes_ >= kMaxWaiting;
  }
  void wait_for_room() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return bytes_ < kMaxWaiting || closed_; });
  }
  /// Nobody takes frames any more.
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Frame> frames_;
  size_t bytes_ = 0;
  bool closed_ = false;
};

/// The streams between this worker and that of another rank. Belongs to the thread of the sockets, except run_sender()
/// and run_receiver(), which are the bodies of the rank's two threads.
class RankStreams {
 public:
  RankStreams(Loop& loop, c10::intrusive_ptr<c10d::Backend> backend, int rank)
      : loop_(loop), exchange_(std::move(backend), rank), rank_(rank) {}
  RankStreams(const RankStreams&) = delete;
  RankStreams& operator=(const RankStreams&) = delete;
  ~RankStreams() { close(); }

  /// Listens on the socket that leads to the rank.
  Result<> listen() {
    std::array<uint8_t, 12> name;
    fill_secure_random(name);
    Acceptor::Options options;
    options.plain = true;  // the workers at both ends authenticate each other
    MUSTER_ASSIGN(acceptor_, Acceptor::create(loop_, Address::unix_abstract("muster-relay-" + to_hex(name)), options,
                                              [this](Connection connection) { on_accepted(std::move(connection)); }));
    address_ = acceptor_->address();
    return {};
  }
  const Address& address() const { return address_; }
  void set_own_address(const Address& own) { own_address_ = own; }

  /// Sends the last frame once all streams have ended.
  void leave() {
    leaves_ = true;
    if (streams_.empty()) say_bye();
  }

  void run_sender() {
    try {
      for (bool last = false; !last;) {
        const Frame frame = to_rank_.pop(kHeartbeat).value_or(Frame());
        exchange_.send(frame);
        last = frame.header.kind == FrameKind::kBye;
        if (to_rank_.release(frame.bytes.size())) loop_.post([this] { resume(); });
      }
    } catch (const std::exception& error) {
      fail(error);
    }
  }

  void run_receiver() {
    try {
      for (bool last = false; !last;) {
        Frame frame = exchange_.receive();
        last = frame.header.kind == FrameKind::kBye;
        from_rank_.push(std::move(frame));
        loop_.post([this] { deliver(*from_rank_.pop(Duration::zero())); });
        from_rank_.wait_for_room();
      }
    } catch (const std::exception& error) {
      fail(error);
    }
  }

 private:
  struct Connected {
    std::unique_ptr<Stream> socket;
    Bytes unwritten;     ///< of the rank, for the socket
    size_t written = 0;  ///< of `unwritten`
    bool ends = false;   ///< once all is written
  };
  using Key = std::pair<bool, uint32_t>;  ///< opened here, number

  void say_bye() {
    if (!std::exchange(said_bye_, true)) to_rank_.push({{.kind = FrameKind::kBye}, {}});
  }

  void fail(const std::exception& error) {
    loop_.post([this, what = std::string(error.what())] {
      log(LogLevel::kWarning, "RPC over a process group has lost rank " + std::to_string(rank_) + ": " + what);
      close();
    });
  }

  void close() {
    acceptor_.reset();
    while (!streams_.empty()) erase(streams_.begin()->first);
    from_rank_.close();
  }

  void on_accepted(Connection connection) {
    if (streams_.size() >= kMaxStreams) return;
    const Key key{true, next_++};
    to_rank_.push({{.kind = FrameKind::kOpen, .opened_here = 1, .stream = key.second}, {}});
    add(key, std::move(connection.stream));
  }

  void add(const Key& key, std::unique_ptr<Stream> socket) {
    const int fd = socket->fd();
    streams_[key].socket = std::move(socket);
    (void)loop_.watch(fd, EPOLLIN, [this, key](uint32_t) { on_event(key); });
    on_event(key);
  }

  void erase(const Key& key) {
    const auto found = streams_.find(key);
    loop_.unwatch(found->second.socket->fd());
    from_rank_.release(found->second.unwritten.size() - found->second.written);
    streams_.erase(found);
    if (leaves_ && streams_.empty()) say_bye();
  }

  /// The socket has ended.
  void end(const Key& key) {
    to_rank_.push({{.kind = FrameKind::kClose, .opened_here = key.first, .stream = key.second}, {}});
    erase(key);
  }

  void on_event(const Key& key) {
    const auto found = streams_.find(key);
    if (found == streams_.end()) return;
    Connected& stream = found->second;
    if (!write(stream) || !read(key, stream)) return end(key);
    if (stream.ends && stream.unwritten.empty()) return erase(key);
    uint32_t events = 0;
    if (!to_rank_.is_full()) events |= EPOLLIN;
    if (!stream.unwritten.empty()) events |= EPOLLOUT;
    (void)loop_.modify(stream.socket->fd(), events);
  }

  /// False once the socket has ended.
  bool write(Connected& stream) {
    while (stream.written < stream.unwritten.size()) {
      const auto moved = stream.socket->write(ByteView(stream.unwritten).subspan(stream.written));
      if (!moved) return false;
      if (*moved == 0) return true;
      stream.written += *moved;
      from_rank_.release(*moved);
    }
    stream.unwritten.clear();
    stream.written = 0;
    return true;
  }

  bool read(const Key& key, Connected& stream) {
    while (!to_rank_.is_full()) {
      Bytes bytes(kMaxChunk);
      const auto moved = stream.socket->read(MutableByteView(bytes));
      if (!moved) return false;
      if (*moved == 0) return true;
      bytes.resize(*moved);
      to_rank_.push({{.kind = FrameKind::kData, .opened_here = key.first, .stream = key.second, .bytes = *moved},
                     std::move(bytes)});
    }
    return true;
  }

  /// The queue to the rank has room again.
  void resume() {
    std::vector<Key> keys;
    for (const auto& [key, stream] : streams_) keys.push_back(key);
    for (const Key& key : keys) on_event(key);
  }

  void deliver(Frame frame) {
    const Key key{frame.header.opened_here == 0, frame.header.stream};
    const auto found = streams_.find(key);
    switch (frame.header.kind) {
      case FrameKind::kOpen:
        if (found == streams_.end() && !key.first && streams_.size() < 2 * kMaxStreams) open(key);
        break;
      case FrameKind::kData:
        if (found == streams_.end() || found->second.ends) break;
        found->second.unwritten.insert(found->second.unwritten.end(), frame.bytes.begin(), frame.bytes.end());
        return on_event(key);  // its bytes are released once they are written
      case FrameKind::kClose:
        if (found == streams_.end()) break;
        found->second.ends = true;
        return on_event(key);
      case FrameKind::kBye:
        say_bye();
        close();
        break;
      default:
        break;
    }
    from_rank_.release(frame.bytes.size());
  }

  void open(const Key& key) {
    auto socket = start_connect(own_address_);
    if (socket) return add(key, plain_stream(std::move(*socket)));
    to_rank_.push({{.kind = FrameKind::kClose, .opened_here = 0, .stream = key.second}, {}});
  }

  Loop& loop_;
  const FrameExchange exchange_;
  const int rank_;
  Address address_, own_address_;
  std::unique_ptr<Acceptor> acceptor_;  ///< null once the rank is gone
  std::map<Key, Connected> streams_;
  uint32_t next_ = 0;
  bool leaves_ = false, said_bye_ = false;
  FrameQueue to_rank_, from_rank_;
};

/// The loop, its thread, and the threads of all ranks. They share it, because a rank that hangs may keep them for
/// longer than the relay lives.
class RelayThreads : public std::enable_shared_from_this<RelayThreads> {
 public:
  static Result<std::shared_ptr<RelayThreads>> start(const c10::intrusive_ptr<c10d::Backend>& backend) {
    const auto threads = std::make_shared<RelayThreads>();
    MUSTER_ASSIGN(threads->loop_, Loop::create());
    for (int rank = 0; rank < backend->getSize(); ++rank) {
      if (rank == backend->getRank()) continue;
      auto& streams = threads->ranks_[rank] = std::make_unique<RankStreams>(*threads->loop_, backend, rank);
      MUSTER_TRY(streams->listen());
    }
    return threads;
  }
  ~RelayThreads() { ranks_.clear(); }  // before the loop

  void run(const Address& own) {
    for (auto& [rank, streams] : ranks_) {
      streams->set_own_address(own);
      add([streams = streams.get()] { streams->run_sender(); });
      add([streams = streams.get()] { streams->run_receiver(); });
    }
    // The loop runs for as long as the other threads use it.
    std::thread([self = shared_from_this()] {  // tidy: allow(detach) stop() waits for it, but not forever
      while (self->running_.load() > 0) self->loop_->run_once(Deadline::never());
      const std::lock_guard lock(self->mutex_);
      self->ended_ = true;
      self->changed_.notify_all();
    })
        .detach();
  }

  /// The socket that leads to the rank.
  const Address* find(int rank) const {
    const auto found = ranks_.find(rank);
    return found == ranks_.end() ? nullptr : &found->second->address();
  }

  /// Waits until the other ranks have read the last frames, but not forever.
  void stop() {
    loop_->post([this] {
      for (auto& [rank, streams] : ranks_) streams->leave();
    });
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, kByeTime, [this] { return ended_; })) return;
    log(LogLevel::kWarning, "RPC over a process group has ended while other ranks did not answer");
  }

 private:
  void add(std::function<void()> body) {
    ++running_;
    std::thread([self = shared_from_this(), body = std::move(body)] {  // tidy: allow(detach) stop() waits for it
      body();
      --self->running_;
      self->loop_->wake();
    })
        .detach();
  }

  std::unique_ptr<Loop> loop_;
  std::map<int, std::unique_ptr<RankStreams>> ranks_;
  std::atomic<int> running_ = 0;  ///< threads of ranks
  std::mutex mutex_;              ///< guards ended_
  std::condition_variable changed_;
  bool ended_ = false;
};

class ProcessGroupRelay final : public Relay {
 public:
  ProcessGroupRelay(std::shared_ptr<RelayThreads> threads, int rank) : threads_(std::move(threads)), rank_(rank) {}
  ~ProcessGroupRelay() override {
    if (published_) threads_->stop();
  }

  Result<std::string> publish(const Address& own) override {
    threads_->run(own);
    published_ = true;
    return "rank:" + std::to_string(rank_);
  }

  Result<Address> route(const std::string& published) override {
    int rank = -1;
    const char* const end = published.data() + published.size();
    const bool valid = published.starts_with("rank:") && std::from_chars(published.data() + 5, end, rank).ptr == end;
    const Address* const found = valid ? threads_->find(rank) : nullptr;
    if (found != nullptr) return *found;
    return fail(ErrorCode::kInvalidArgument,
                "\"" + published + "\" is no other rank of the process group: all workers must use the same one");
  }

 private:
  const std::shared_ptr<RelayThreads> threads_;
  const int rank_;
  bool published_ = false;
};

}  // namespace

Result<std::shared_ptr<Relay>> relay_over(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    backend = group->getBackend(c10::DeviceType::CPU);
  } catch (const std::exception& error) {
    return fail(ErrorCode::kInvalidArgument,
                std::string("RPC needs a group that can send CPU tensors: ") + error.what());
  }
  MUSTER_ASSIGN(auto threads, RelayThreads::start(backend));
  return std::make_shared<ProcessGroupRelay>(std::move(threads), backend->getRank());
}

}  // namespace muster::rpc
