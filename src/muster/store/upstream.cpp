// A proxy's side of its one link to the server above: every request gets a number of the link's own, and the reply
// finds its way back by it.

#include <fmt/format.h>

#include <optional>
#include <unordered_map>

#include "muster/base/log.h"
#include "muster/store/backend.h"
#include "muster/store/channel.h"
#include "muster/store/connect.h"
#include "muster/store/messages.h"

namespace muster {
namespace {

class Upstream : public Backend {
 public:
  Upstream(Loop& loop, UpstreamOptions options, Connection connection, Deliver deliver)
      : url_(std::move(options.url)),
        deliver_(std::move(deliver)),
        channel_(loop, std::move(connection.stream), Channel::Options{options.max_queue},
                 {[this](ByteView bytes) { on_input(bytes); }, [this](const Error& why) { on_lost(why); }}) {
    parser_.feed(connection.leftover);
  }

  Result<> start() { return channel_.start(); }

  void submit(Request request, ClientId client) override {
    if (lost_) return refuse(request, client, *lost_);
    if (request.operation == Operation::kCancel) return cancel(request.id, client);
    if (channel_.over()) {
      return refuse(request, client,
                    Error{ErrorCode::kResourceExhausted, "the store at " + url_ + " does not keep up"});
    }
    const Origin origin{client, request.id};
    const RequestId id = next_id_++;
    request.id = id;
    const auto frame = encode_request(request);
    if (!frame) {
      request.id = origin.id;
      return refuse(request, client, frame.error());
    }
    origins_[id] = origin;
    by_client_[client][origin.id] = id;
    send(*frame);
  }

  void drop(ClientId client) override {
    const auto found = by_client_.find(client);
    if (found == by_client_.end()) return;
    const auto waits = std::move(found->second);
    by_client_.erase(found);
    for (const auto& [theirs, ours] : waits) {
      origins_.erase(ours);
      if (!lost_) send_cancel(ours);
    }
  }

 private:
  struct Origin {
    ClientId client;
    RequestId id;
  };

  void refuse(const Request& request, ClientId client, const Error& why) {
    if (request.operation != Operation::kCancel) deliver_({Reply{client, request.id, tl::unexpected(why)}});
  }

  void cancel(RequestId theirs, ClientId client) {
    const auto found = by_client_.find(client);
    if (found == by_client_.end()) return;
    if (const auto ours = found->second.find(theirs); ours != found->second.end()) send_cancel(ours->second);
  }

  void send_cancel(RequestId ours) { send(*encode_request({Operation::kCancel, ours})); }

  void send(ByteView frame) {
    channel_.out().insert(channel_.out().end(), frame.begin(), frame.end());
    channel_.flush();
  }

  void on_input(ByteView bytes) {
    parser_.feed(bytes);
    Replies replies;
    while (!lost_) {
      auto reply = next_reply(parser_);
      if (!reply) {
        deliver_(std::move(replies));
        channel_.close();
        return on_lost(reply.error());
      }
      if (!*reply) break;
      if (take_origin(**reply)) replies.push_back(std::move(**reply));
    }
    deliver_(std::move(replies));
  }

  // Puts the reply into its client's terms. False when that client is gone.
  bool take_origin(Reply& reply) {
    const auto found = origins_.find(reply.id);
    if (found == origins_.end()) return false;
    reply.client = found->second.client;
    reply.id = found->second.id;
    origins_.erase(found);
    const auto client = by_client_.find(reply.client);
    client->second.erase(reply.id);
    if (client->second.empty()) by_client_.erase(client);
    return true;
  }

  void on_lost(const Error& why) {
    lost_ = Error{ErrorCode::kPeerLost, fmt::format("this node's proxy lost the store at {}: {}", url_, why.message)};
    log(LogLevel::kError, lost_->message);
    Replies replies;
    for (const auto& [ours, origin] : origins_) replies.push_back({origin.client, origin.id, tl::unexpected(*lost_)});
    origins_.clear();
    by_client_.clear();
    deliver_(std::move(replies));
  }

  const std::string url_;
  Deliver deliver_;
  Channel channel_;
  FrameParser parser_{kMaxMessageBytes};
  RequestId next_id_ = 1;
  std::unordered_map<RequestId, Origin> origins_;
  std::unordered_map<ClientId, std::unordered_map<RequestId, RequestId>> by_client_;  // their number to ours
  std::optional<Error> lost_;
};

}  // namespace

Result<std::unique_ptr<Backend>> upstream_backend(Loop& loop, UpstreamOptions options, const Deadline& deadline,
                                                  Backend::Deliver deliver) {
  MUSTER_ASSIGN(Connection connection, connect_to_store(options.url, options.credentials, deadline));
  auto upstream = std::make_unique<Upstream>(loop, std::move(options), std::move(connection), std::move(deliver));
  MUSTER_TRY(upstream->start());
  return upstream;
}

}  // namespace muster
