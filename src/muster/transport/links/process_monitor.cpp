#include "muster/transport/links/process_monitor.h"

#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

namespace muster {

Fd monitor_process(Loop& loop, const ProcessIdentity& self, const ProcessIdentity& peer, std::function<void()> died) {
  if (self.domain.empty() || self.domain != peer.domain || peer.pid == self.pid) return {};
  Fd process(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
  if (!process) return {};
  const auto watched =
      loop.watch(process.get(), EPOLLIN, [&loop, fd = process.get(), died = std::move(died)](uint32_t) {
        loop.after(kLastReportTime, died);
        loop.unwatch(fd);
      });
  return watched ? std::move(process) : Fd();
}

}  // namespace muster
