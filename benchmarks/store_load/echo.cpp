#include "echo.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "muster/base/bytes.h"
#include "muster/io/fd.h"

namespace muster::load {
namespace {

constexpr int kEchoEvents = 512;

class Echo {
 public:
  Echo(int epoll, const EchoPlan& plan) : epoll_(epoll), plan_(plan) {}

  void accept_all(int listener) {
    for (;;) {
      Fd socket(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!socket) return;
      const int fd = socket.get(), on = 1;
      setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      epoll_event event{EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, {.fd = fd}};
      if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) return;
      clients_.resize(std::max<size_t>(clients_.size(), static_cast<size_t>(fd) + 1));
      clients_[fd] = Client{std::move(socket)};
    }
  }

  void on_event(int fd, uint32_t events) {
    Client& client = clients_[fd];
    if (client.owed > 0) send_owed(client);
    for (;;) {
      const ssize_t n = recv(fd, buffer_.data(), buffer_.size(), 0);
      if (n == 0 || (n < 0 && errno != EAGAIN)) return client.socket.reset();
      if (n < 0) return;
      count(client, static_cast<size_t>(n));
      if (n < static_cast<ssize_t>(buffer_.size()) && !(events & EPOLLRDHUP)) return;
    }
  }

 private:
  struct Client {
    Fd socket;
    size_t turns = 0;  // that are done, the greeting among them
    size_t received = 0;
    size_t owed = 0;
  };

  void count(Client& client, size_t bytes) {
    client.received += bytes;
    for (const Turn* now = &turn(client); client.received >= now->request; now = &turn(client)) {
      client.received -= now->request;
      ++client.turns;
      client.owed += now->reply;
      if (plan_.gather == 0 || client.turns == 1) {
        send_owed(client);
      } else {
        gather(client);
      }
    }
  }

  void gather(Client& client) {
    gathered_.push_back(client.socket.get());
    if (gathered_.size() < plan_.gather) return;
    for (const int fd : std::exchange(gathered_, {})) send_owed(clients_[static_cast<size_t>(fd)]);
  }

  const Turn& turn(const Client& client) const {
    return client.turns == 0 ? plan_.greeting : plan_.turns[(client.turns - 1) % plan_.turns.size()];
  }

  void send_owed(Client& client) {
    if (zeros_.size() < client.owed) zeros_.resize(client.owed);
    const ssize_t n = send(client.socket.get(), zeros_.data(), client.owed, MSG_NOSIGNAL);
    if (n > 0) client.owed -= static_cast<size_t>(n);
  }

  const int epoll_;
  const EchoPlan& plan_;
  std::vector<Client> clients_;  // by descriptor
  std::vector<int> gathered_;
  Bytes buffer_ = Bytes(256 << 10);
  Bytes zeros_;
};

}  // namespace

Result<> serve_echo(int listener, const EchoPlan& plan) {
  const Fd epoll(epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{EPOLLIN, {.fd = listener}};
  if (!epoll || epoll_ctl(epoll.get(), EPOLL_CTL_ADD, listener, &event) != 0) {
    return fail_errno(errno, "cannot watch the floor's listener");
  }
  Echo echo(epoll.get(), plan);
  for (;;) {
    epoll_event events[kEchoEvents];
    const int ready = epoll_wait(epoll.get(), events, kEchoEvents, -1);
    if (ready < 0 && errno != EINTR) return fail_errno(errno, "cannot wait for the floor's clients");
    for (int i = 0; i < ready; ++i) {
      const int fd = events[i].data.fd;
      if (fd == listener) {
        echo.accept_all(listener);
      } else {
        echo.on_event(fd, events[i].events);
      }
    }
  }
}

}  // namespace muster::load
