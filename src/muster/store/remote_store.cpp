// The store has no thread. One of the waiting callers is the reader: it polls the socket for all callers. When the
// reader has its own reply, another caller becomes the reader. A single caller writes, polls and reads itself, so no
// thread has to wake another one.

#include "muster/store/remote_store.h"

#include <fmt/format.h>
#include <poll.h>

#include <condition_variable>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "muster/store/connect.h"
#include "muster/store/external_store.h"
#include "muster/store/protocol/messages.h"
#include "muster/store/protocol/outbox.h"

namespace muster {
namespace {

constexpr Duration kConnectTimeout = 30s;

class RemoteStore : public Store {
 public:
  RemoteStore(std::string url, Credentials credentials, Connection connection)
      : url_(std::move(url)), credentials_(std::move(credentials)), stream_(std::move(connection.stream)) {
    parser_.feed(connection.leftover);
  }

  Result<std::unique_ptr<Store>> clone() override {
    return remote_store(url_, credentials_, Deadline::after(kConnectTimeout));
  }

  std::optional<HostPort> address() const override {
    constexpr std::string_view kScheme = "tcp://";
    if (!url_.starts_with(kScheme)) return std::nullopt;
    const auto server = parse_host_port(std::string_view(url_).substr(kScheme.size()), 0);
    if (!server) return std::nullopt;
    return *server;
  }

  Result<Reply> call(Request request, const Deadline& deadline) override {
    MUSTER_TRY(validate(request));
    std::unique_lock lock(mutex_);
    if (lost_) return tl::unexpected(*lost_);
    Call call;
    request.id = next_id_++;
    MUSTER_ASSIGN(const Bytes frame, encode_request(request));
    request.values.clear();  // error messages need only the rest
    calls_[request.id] = &call;
    send(frame);
    drive(lock, call, deadline);
    if (!call.reply && !lost_) cancel(lock, request, call);
    calls_.erase(request.id);
    pass_on_reading();
    if (!call.reply && lost_) return tl::unexpected(lost_->in(describe(request)));
    return outcome(std::move(call.reply), request, url_);
  }

 private:
  struct Call {
    std::condition_variable turn;  // signaled when the reply has come, or when this call becomes the reader
    std::optional<Reply> reply;
    bool sleeps = false;
  };

  // The caller of the following functions holds the mutex.

  void send(ByteView frame) {
    outbox_.tail().insert(outbox_.tail().end(), frame.begin(), frame.end());
    flush();
  }

  void flush() {
    if (const auto written = outbox_.flush(*stream_); !written) lose(written.error());
  }

  // Returns when the call has its reply, when the connection is lost, or when the deadline has passed.
  void drive(std::unique_lock<std::mutex>& lock, Call& call, const Deadline& deadline) {
    while (!call.reply && !lost_ && !deadline.passed()) {
      if (!reader_ || !outbox_.empty()) {
        poll_socket(lock, deadline);
      } else {
        call.sleeps = true;
        call.turn.wait_for(lock, deadline.left());
        call.sleeps = false;
      }
    }
  }

  // Only the reader reads. Any caller may write while output is left.
  void poll_socket(std::unique_lock<std::mutex>& lock, const Deadline& deadline) {
    const bool reads = !reader_;
    const bool writes = !outbox_.empty() || stream_->wants_write();
    pollfd poll{stream_->fd(), static_cast<short>((reads ? POLLIN : 0) | (writes ? POLLOUT : 0)), 0};
    reader_ = true;
    lock.unlock();
    const int ready = ::poll(&poll, 1, deadline.poll_timeout_ms());
    lock.lock();
    if (reads) reader_ = false;
    if (ready <= 0 || lost_) return;
    flush();
    if (reads) read();
  }

  void read() {
    for (bool more = true; more && !lost_;) {
      const iovec segment{read_buffer_.data(), read_buffer_.size()};
      const auto n = stream_->read({&segment, 1});
      if (!n) return lose(n.error());
      if (*n == 0) return;
      more = *n == read_buffer_.size() || stream_->has_buffered();
      parser_.feed(ByteView(read_buffer_).first(*n));
      if (const auto taken = take_replies(); !taken) return lose(taken.error());
    }
  }

  Result<> take_replies() {
    while (true) {
      MUSTER_ASSIGN(auto reply, next_reply(parser_));
      if (!reply) return {};
      const auto found = calls_.find(reply->id);
      if (found == calls_.end()) continue;  // its caller has timed out
      found->second->reply = std::move(reply);
      found->second->turn.notify_one();
    }
  }

  void pass_on_reading() {
    if (reader_) return;
    for (auto& [id, call] : calls_) {
      if (call->sleeps && !call->reply) return call->turn.notify_one();
    }
  }

  void cancel(std::unique_lock<std::mutex>& lock, const Request& request, Call& call) {
    send(*encode_request({StoreOperation::kCancel, request.id}));
    // Before the cancellation arrives, a pop may take an item and a barrier may release the caller. So only these wait
    // for the answer.
    const bool consumes =
        request.operation == StoreOperation::kQueuePop || request.operation == StoreOperation::kBarrier;
    if (consumes) drive(lock, call, Deadline::after(kCancelGrace));
  }

  void lose(const Error& why) {
    lost_ =
        Error{ErrorCode::kPeerLost, fmt::format("the connection to the store at {} is lost: {}", url_, why.message)};
    for (auto& [id, call] : calls_) call->turn.notify_one();
  }

  const std::string url_;
  const Credentials credentials_;
  std::mutex mutex_;  // guards all members below
  std::unique_ptr<Stream> stream_;
  Outbox outbox_;
  FrameParser parser_{kMaxMessageBytes};
  Bytes read_buffer_ = Bytes(Stream::kReadBytes);
  bool reader_ = false;
  RequestId next_id_ = 1;
  std::unordered_map<RequestId, Call*> calls_;
  std::optional<Error> lost_;
};

}  // namespace

Result<std::unique_ptr<Store>> remote_store(const std::string& url, Credentials credentials, const Deadline& deadline) {
  MUSTER_ASSIGN(Connection connection, connect_to_store(url, credentials, deadline));
  return std::make_unique<RemoteStore>(url, std::move(credentials), std::move(connection));
}

}  // namespace muster
