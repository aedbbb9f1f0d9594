#include "muster/launch/agent/health_server.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <string_view>
#include <utility>

#include "muster/io/socket.h"

namespace muster {
namespace {

constexpr size_t kMaxHealthClients = 64;
constexpr Duration kHealthClientTimeout = std::chrono::seconds(2);
constexpr Duration kAcceptPause = std::chrono::seconds(1);
constexpr std::string_view kHealthAnswer =
    "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 3\r\nConnection: close\r\n\r\nok\n";

}  // namespace

struct HealthServer::Client {
  Client(Loop& loop, Fd connected) : socket(std::move(connected)), timeout(loop) {}
  Fd socket;
  Timer timeout;
  bool answered = false;
};

Result<std::unique_ptr<HealthServer>> HealthServer::from_environment(Loop& loop, const Environment& environment) {
  constexpr const char* kVariable = "TORCHELASTIC_HEALTH_CHECK_PORT";
  const std::string text = value_of(environment, kVariable);
  if (text.empty()) return nullptr;
  uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (error != std::errc() || end != text.data() + text.size() || port == 0) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("{}='{}' is not a port from 1 to 65535", kVariable, text));
  }
  MUSTER_ASSIGN(const Address everywhere, Address::parse("0.0.0.0:0"));
  return listen(loop, everywhere.with_port(port));
}

Result<std::unique_ptr<HealthServer>> HealthServer::listen(Loop& loop, const Address& address) {
  MUSTER_ASSIGN(Fd listener, listen_on(address));
  MUSTER_ASSIGN(const Address bound, local_address(listener.get()));
  std::unique_ptr<HealthServer> server(new HealthServer(loop, std::move(listener), bound));
  MUSTER_TRY(server->watch());
  return server;
}

HealthServer::HealthServer(Loop& loop, Fd listener, Address address)
    : loop_(loop), listener_(std::move(listener)), address_(std::move(address)) {}

HealthServer::~HealthServer() {
  loop_.unwatch(listener_.get());
  for (const auto& [fd, client] : clients_) loop_.unwatch(fd);
}

Result<> HealthServer::watch() {
  return loop_.watch(listener_.get(), EPOLLIN, [this](uint32_t) { accept(); });
}

void HealthServer::accept() {
  while (true) {
    auto accepted = accept_from(listener_.get());
    if (!accepted) {
      // The connection stays in the backlog, which would wake the loop again at once.
      loop_.unwatch(listener_.get());
      pause_.start(kAcceptPause, [this] { static_cast<void>(watch()); });
      return;
    }
    if (!*accepted) return;
    Fd& socket = **accepted;
    if (clients_.size() >= kMaxHealthClients) continue;
    const int fd = socket.get();
    if (!loop_.watch(fd, EPOLLIN, [this, fd](uint32_t) { serve(fd); })) continue;
    auto client = std::make_unique<Client>(loop_, std::move(socket));
    client->timeout.start(kHealthClientTimeout, [this, fd] { drop(fd); });
    clients_.emplace(fd, std::move(client));
  }
}

void HealthServer::serve(int fd) {
  std::array<char, 4096> request;
  const ssize_t n = ::recv(fd, request.data(), request.size(), 0);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) return drop(fd);
  Client& client = *clients_.at(fd);
  if (std::exchange(client.answered, true)) return;  // the rest of a long request
  // The answer fits into the socket's buffer. The client closes when it has read it.
  static_cast<void>(::send(fd, kHealthAnswer.data(), kHealthAnswer.size(), MSG_NOSIGNAL));
  ::shutdown(fd, SHUT_WR);
}

void HealthServer::drop(int fd) {
  loop_.unwatch(fd);
  clients_.erase(fd);
}

}  // namespace muster
