#include "muster/torch/rpc/process_group_relay.h"

#include <sys/epoll.h>

#include <atomic>
#include <charconv>
#include <condition_variable>
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
#include "muster/torch/rpc/process_group_frames.h"

namespace muster::rpc {
namespace {

constexpr size_t kMaxStreams = 64;  ///< of one opener, between two ranks
constexpr Duration kHeartbeat = std::chrono::seconds(5);
/// How long a relay that ends waits for the other ranks.
constexpr Duration kByeTime = std::chrono::seconds(5);

/// The streams between this worker and that of another rank. Belongs to the thread of the sockets, except run_sender()
/// and run_receiver(), which are the bodies of the rank's two threads.
class RankStreams {
 public:
  RankStreams(Loop& loop, c10::intrusive_ptr<c10d::Backend> backend, int rank)
      : loop_(loop), exchange_(std::move(backend), rank, kRelayTag), rank_(rank) {}
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
    Bytes unwritten;       ///< of the rank, for the socket
    size_t written = 0;    ///< of `unwritten`
    bool ends = false;     ///< once all is written
    bool writable = true;  ///< the socket takes bytes
    bool watched = true;
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

  /// The rank has left. What it has sent is still written.
  void end_all() {
    acceptor_.reset();
    std::vector<Key> keys;
    for (auto& [key, stream] : streams_) {
      stream.ends = true;
      keys.push_back(key);
    }
    for (const Key& key : keys) on_event(key);
    from_rank_.close();
  }

  static void remove_written(Connected& stream) {
    if (stream.written < kMaxChunk) return;
    stream.unwritten.erase(stream.unwritten.begin(),
                           stream.unwritten.begin() + static_cast<std::ptrdiff_t>(stream.written));
    stream.written = 0;
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
    if (found->second.watched) loop_.unwatch(found->second.socket->fd());
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
    write(stream);
    if (!read(key, stream)) return end(key);
    if (stream.ends && stream.unwritten.empty()) return erase(key);
    uint32_t events = 0;
    if (!to_rank_.is_full()) events |= EPOLLIN;
    if (!stream.unwritten.empty()) events |= EPOLLOUT;
    watch(key, stream, events);
  }

  /// A socket that is not read is not watched, because a hang-up would be reported again and again.
  void watch(const Key& key, Connected& stream, uint32_t events) {
    const int fd = stream.socket->fd();
    if (events == 0) {
      if (std::exchange(stream.watched, false)) loop_.unwatch(fd);
    } else if (std::exchange(stream.watched, true)) {
      (void)loop_.modify(fd, events);
    } else {
      (void)loop_.watch(fd, events, [this, key](uint32_t) { on_event(key); });
    }
  }

  /// What a socket does not take any more is dropped. It may still have something to read.
  void write(Connected& stream) {
    while (stream.written < stream.unwritten.size()) {
      const ByteView rest = ByteView(stream.unwritten).subspan(stream.written);
      const auto moved = stream.writable ? stream.socket->write(rest) : Result<size_t>(rest.size());
      stream.writable = moved.has_value() && stream.writable;
      if (moved && *moved == 0) return;
      stream.written += moved.value_or(0);
      from_rank_.release(moved.value_or(0));
    }
    stream.unwritten.clear();
    stream.written = 0;
  }

  bool read(const Key& key, Connected& stream) {
    while (!to_rank_.is_full()) {
      const auto moved = stream.socket->read(MutableByteView(input_));
      if (!moved) return false;
      if (*moved == 0) return true;
      to_rank_.push({{.kind = FrameKind::kData, .opened_here = key.first, .stream = key.second, .bytes = *moved},
                     Bytes(input_.begin(), input_.begin() + static_cast<std::ptrdiff_t>(*moved))});
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
        remove_written(found->second);
        found->second.unwritten.insert(found->second.unwritten.end(), frame.bytes.begin(), frame.bytes.end());
        return on_event(key);  // its bytes are released once they are written
      case FrameKind::kClose:
        if (found == streams_.end()) break;
        found->second.ends = true;
        return on_event(key);
      case FrameKind::kBye:
        say_bye();
        end_all();
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
  Bytes input_ = Bytes(kMaxChunk);  ///< for one read
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
