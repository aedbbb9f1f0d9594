#include "muster/store/etcd/etcd_client.h"

#include <fmt/format.h>

#include <algorithm>

namespace muster {
namespace {

using etcd::Json;

constexpr size_t kIdleRequests = 8;
// The timeout of an endpoint while other endpoints remain to be tried.
constexpr Duration kPatience = 3s;

// Maps gRPC's status codes, which the gateway passes on.
ErrorCode code_of(int64_t grpc, std::string_view message) {
  if (message.find("user name is empty") != std::string_view::npos) return ErrorCode::kAuthentication;
  if (message.find("authentication failed") != std::string_view::npos) return ErrorCode::kAuthentication;
  switch (grpc) {
    case 7:
    case 16:
      return ErrorCode::kAuthentication;
    case 8:
      return ErrorCode::kResourceExhausted;
    case 4:
    case 14:
      return ErrorCode::kUnavailable;
    default:
      return message.find("too large") != std::string_view::npos ? ErrorCode::kResourceExhausted : ErrorCode::kIo;
  }
}

}  // namespace

std::string EtcdTarget::name() const {
  std::string text = "etcd at ";
  for (const HostPort& host : hosts)
    text += fmt::format("{}{}:{}", &host == hosts.data() ? "" : ", ", host.host, host.port);
  return text;
}

Result<std::shared_ptr<EtcdClient>> EtcdClient::connect(EtcdTarget target, const Deadline& deadline) {
  std::shared_ptr<EtcdClient> client(new EtcdClient(std::move(target)));
  const auto answer = [&]() -> Result<> {
    if (!client->target_.user.empty()) MUSTER_TRY(client->log_in(deadline));
    MUSTER_TRY(client->call("kv/range", etcd::range({"muster"}, {{"count_only", true}})["request_range"], Kind::kReads,
                            deadline));
    return {};
  }();
  if (answer) return client;
  const bool unreachable = answer.error().code == ErrorCode::kPeerLost;
  return fail(unreachable ? ErrorCode::kUnavailable : answer.error().code, answer.error().message);
}

Result<std::unique_ptr<Http>> EtcdClient::take() {
  const std::lock_guard lock(mutex_);
  if (idle_.empty()) return Http::create();
  std::unique_ptr<Http> http = std::move(idle_.back());
  idle_.pop_back();
  return http;
}

void EtcdClient::give_back(std::unique_ptr<Http> http) {
  const std::lock_guard lock(mutex_);
  if (idle_.size() < kIdleRequests) idle_.push_back(std::move(http));
}

Result<> EtcdClient::log_in(const Deadline& deadline) {
  const Json body = {{"name", target_.user}, {"password", target_.password}};
  {
    const std::lock_guard lock(mutex_);
    token_.clear();
  }
  const std::string text = body.dump(-1, ' ', false, Json::error_handler_t::replace);
  MUSTER_ASSIGN(const Http::Answer answer, post("auth/authenticate", text, Kind::kReads, deadline));
  if (answer.status != 200) return tl::unexpected(refusal(answer));
  const std::lock_guard lock(mutex_);
  token_ = etcd::text(Json::parse(answer.body, nullptr, false), "token");
  return {};
}

// Tries the endpoint that answered last, then the others. A change is not repeated if the endpoint may have received
// it.
Result<Http::Answer> EtcdClient::post(const char* path, const std::string& body, Kind kind, const Deadline& deadline,
                                      const Http::OnLine& on_line) {
  MUSTER_ASSIGN(std::unique_ptr<Http> http, take());
  HttpRequest request{{}, body, {}, target_.files};
  size_t first = 0;
  {
    const std::lock_guard lock(mutex_);
    request.authorization = token_;
    first = preferred_;
  }
  Error why;
  for (size_t i = 0; i < target_.hosts.size(); ++i) {
    const size_t index = (first + i) % target_.hosts.size();
    const HostPort& host = target_.hosts[index];
    const bool v6 = host.host.find(':') != std::string::npos;
    request.url = fmt::format("{}://{}{}{}:{}/v3/{}", target_.https ? "https" : "http", v6 ? "[" : "", host.host,
                              v6 ? "]" : "", host.port, path);
    const bool others = i + 1 < target_.hosts.size() && !on_line;
    auto answer =
        http->post(request, others ? deadline.or_sooner(deadline.clock().now() + kPatience) : deadline, on_line);
    if (answer) {
      give_back(std::move(http));
      const std::lock_guard lock(mutex_);
      preferred_ = index;
      return std::move(*answer);
    }
    why = answer.error().error;
    if ((answer.error().was_sent && kind == Kind::kChanges) || deadline.passed()) break;
  }
  return fail(why.code, fmt::format("{} does not answer: {}", target_.name(), why.message));
}

Error EtcdClient::refusal(const Http::Answer& answer) const {
  const Json body = Json::parse(answer.body, nullptr, false);
  std::string message = etcd::text(body, "error");
  if (message.empty()) message = etcd::text(body, "message");
  if (message.empty()) message = fmt::format("HTTP status {}, {}", answer.status, answer.body.substr(0, 200));
  return {code_of(etcd::number(body, "code"), message), fmt::format("{} says: {}", target_.name(), message)};
}

Result<Json> EtcdClient::call(const char* path, const Json& body, Kind kind, const Deadline& deadline) {
  const std::string text = body.dump();
  MUSTER_ASSIGN(Http::Answer answer, post(path, text, kind, deadline));
  if (answer.status == 401 && !target_.user.empty()) {  // etcd expires tokens that are not used
    MUSTER_TRY(log_in(deadline));
    MUSTER_ASSIGN(answer, post(path, text, kind, deadline));
  }
  if (answer.status != 200) return tl::unexpected(refusal(answer));
  Json json = Json::parse(answer.body, nullptr, false);
  if (json.is_object()) return json;
  return fail(ErrorCode::kProtocol, target_.name() + "'s answer is not a JSON object");
}

Result<> EtcdClient::watch(const std::vector<EtcdRange>& ranges, int64_t revision, const Deadline& deadline) {
  std::string body;
  for (const EtcdRange& watched : ranges) {
    Json create = etcd::range(watched)["request_range"];
    create["start_revision"] = std::to_string(revision + 1);
    body += Json{{"create_request", create}}.dump();
  }
  // etcd reports changes between `revision` and the start of the watch only after up to 100 ms. So this function checks
  // for them itself.
  const auto changed_already = [&](const Json& result) {
    if (etcd::revision(result) <= revision) return false;
    return std::any_of(ranges.begin(), ranges.end(), [&](const EtcdRange& watched) {
      const Json since = {{"min_mod_revision", std::to_string(revision + 1)}, {"limit", 1}, {"keys_only", true}};
      const auto found = call("kv/range", etcd::range(watched, since)["request_range"], Kind::kReads, deadline);
      return found && etcd::key_of(*found).found;
    });
  };
  // The wait also ends if the watch ends or fails. The caller then reads again and sees the error.
  std::string last;
  const auto goes_on = [&](std::string_view line) {
    last = line;
    const Json json = Json::parse(line, nullptr, false);
    const Json& result = etcd::part(json, "result");
    if (etcd::part(result, "created").is_boolean() && changed_already(result)) return false;
    return etcd::part(result, "events").empty() && !etcd::part(result, "canceled").is_boolean() &&
           !etcd::part(json, "error").is_object();
  };
  const auto answer = post("watch", body, Kind::kReads, deadline, goes_on);
  if (answer && answer->status != 200) return tl::unexpected(refusal({answer->status, last}));
  if (answer || answer.error().code == ErrorCode::kTimeout) return {};
  return tl::unexpected(answer.error());
}

}  // namespace muster
