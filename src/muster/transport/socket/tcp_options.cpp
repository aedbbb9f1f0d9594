#include "muster/transport/socket/tcp_options.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <string>

namespace muster {
namespace {

constexpr int kIdleSeconds = 15;
constexpr int kProbeSeconds = 5;
constexpr int kProbes = 3;
constexpr int kMinUnanswered = 3;  // segments or window probes, so that one long pause between probes is no silence

bool set_option(int socket, int level, int option, int value) {
  return setsockopt(socket, level, option, &value, sizeof value) == 0;
}

}  // namespace

void watch_idle_tcp(int socket) {
  // Fails at once for a Unix socket, which needs nothing; a kernel without one of these options does without it.
  if (!set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, kIdleSeconds)) return;
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, kProbeSeconds);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
}

Result<> check_tcp_peer(int socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};
  const int unanswered = info.tcpi_retransmits + info.tcpi_probes;
  const auto silence = std::chrono::milliseconds(info.tcpi_last_ack_recv);
  if (unanswered < kMinUnanswered || silence < kTcpSilence) return {};
  return fail(ErrorCode::kTimeout,
              "its host has not answered for " + std::to_string(silence.count() / 1000) + " seconds");
}

}  // namespace muster
