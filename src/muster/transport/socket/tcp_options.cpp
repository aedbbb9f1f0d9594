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
// Segments or window probes. More than one, so that one long pause between probes does not count as silence.
constexpr int kMinUnanswered = 3;

bool set_option(int socket, int level, int option, int value) {
  return setsockopt(socket, level, option, &value, sizeof value) == 0;
}

}  // namespace

void watch_idle_tcp(int socket) {
  // The first call fails for a Unix socket, which needs no keepalive. If the kernel lacks one of the other options, the
  // link works without it.
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
