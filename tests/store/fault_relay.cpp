#include "store/fault_relay.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "muster/base/check.h"

namespace muster {
namespace {
constexpr size_t kMaxPending = 1 << 20;
constexpr size_t kReadBytes = 16 << 10;
TimePoint now() { return steady_clock().now(); }
}  // namespace

FaultRelay::FaultRelay(Address target, RelayFaults faults, uint64_t seed)
    : target_(std::move(target)), faults_(faults), random_(seed), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  auto listener = listen_on(*Address::parse("127.0.0.1:0"));
  MUSTER_CHECK(listener.has_value(), "the relay cannot listen");
  listener_ = std::move(*listener);
  address_ = *local_address(listener_.get());
  thread_ = std::thread([this] { serve(); });
}

FaultRelay::~FaultRelay() {
  stop_ = true;
  eventfd_write(wake_.get(), 1);
  thread_.join();
}

void FaultRelay::retarget(Address target) {
  const std::lock_guard lock(mutex_);
  target_ = std::move(target);
}

void FaultRelay::cut_all() {
  cut_all_ = true;
  eventfd_write(wake_.get(), 1);
}

void FaultRelay::hold(bool held) {
  held_ = held;
  eventfd_write(wake_.get(), 1);
}

void FaultRelay::serve() {
  while (!stop_) {
    const bool held = held_;
    std::vector<pollfd> polls{{wake_.get(), POLLIN, 0}};
    if (!held) polls.push_back({listener_.get(), POLLIN, 0});
    for (const auto& pair : pairs_) {
      for (int end = 0; end < 2 && !held; ++end) {
        const Direction &out = pair->directions[end], &in = pair->directions[1 - end];
        const bool reads = !out.ended && out.pending.size() < kMaxPending;
        const bool writes = !in.pending.empty() && in.not_before <= now();
        polls.push_back({pair->ends[end].get(), static_cast<short>((reads ? POLLIN : 0) | (writes ? POLLOUT : 0)), 0});
      }
    }
    ::poll(polls.data(), polls.size(), held ? 1000 : poll_timeout_ms());
    eventfd_t ignored;
    eventfd_read(wake_.get(), &ignored);
    if (cut_all_.exchange(false)) {
      for (const auto& pair : pairs_) cut(*pair);
    }
    if (!held) {
      for (const auto& pair : pairs_) {
        for (int end = 0; end < 2 && !pair->gone; ++end) read_from(*pair, end);
        for (int end = 0; end < 2 && !pair->gone; ++end) write_to(*pair, end);
      }
      accept_all();
    }
    std::erase_if(pairs_, [](const auto& pair) { return pair->gone; });
  }
}

void FaultRelay::accept_all() {
  while (true) {
    auto accepted = accept_from(listener_.get());
    if (!accepted || !*accepted) return;
    auto upward = [this] {
      const std::lock_guard lock(mutex_);
      return start_connect(target_);
    }();
    if (!upward) continue;  // the client sees a closed connection, as if no server listened
    auto pair = std::make_unique<Pair>();
    pair->ends[0] = std::move(**accepted);
    pair->ends[1] = std::move(*upward);
    pairs_.push_back(std::move(pair));
  }
}

void FaultRelay::read_from(Pair& pair, int end) {
  Direction& direction = pair.directions[end];
  if (direction.ended || direction.pending.size() >= kMaxPending) return;
  uint8_t buffer[kReadBytes];
  const ssize_t n = recv(pair.ends[end].get(), buffer, sizeof buffer, 0);
  if (n < 0 && (errno == EAGAIN || errno == ENOTCONN || errno == EINTR)) return;
  if (n <= 0) {
    direction.ended = true;
    if (n < 0 || direction.pending.empty()) pair.gone = true;
    return;
  }
  direction.pending.insert(direction.pending.end(), buffer, buffer + n);
  misbehave(direction, static_cast<size_t>(n));
}

void FaultRelay::misbehave(Direction& direction, size_t piece) {
  const size_t before = direction.pending.size() - piece;
  const auto later = [&] { return now() + Duration(random_.below(static_cast<uint64_t>(faults_.max_delay.count()))); };
  if (random_.chance(faults_.cut))
    direction.until_cut = std::min(direction.until_cut, before + random_.below(piece + 1));
  if (random_.chance(faults_.delay)) direction.not_before = later();
}

void FaultRelay::write_to(Pair& pair, int end) {
  Direction& direction = pair.directions[1 - end];
  if (direction.not_before > now()) return;
  size_t count = std::min(direction.pending.size(), direction.until_cut);
  const bool split = count > 1 && random_.chance(faults_.split);
  if (split) count = random_.between(1, count - 1);
  if (count > 0) {
    const ssize_t n = send(pair.ends[end].get(), direction.pending.data(), count, MSG_NOSIGNAL);
    if (n < 0 && (errno == EAGAIN || errno == ENOTCONN || errno == EINTR)) return;
    if (n < 0) {
      pair.gone = true;
      return;
    }
    direction.pending.erase(direction.pending.begin(), direction.pending.begin() + n);
    if (direction.until_cut != SIZE_MAX) direction.until_cut -= static_cast<size_t>(n);
    if (split) direction.not_before = now() + Duration(random_.below(static_cast<uint64_t>(faults_.max_delay.count())));
  }
  if (direction.until_cut == 0) cut(pair);
  if (direction.ended && direction.pending.empty()) pair.gone = true;
}

void FaultRelay::cut(Pair& pair) {
  if (!pair.gone) ++cuts_;
  pair.gone = true;
}

int FaultRelay::poll_timeout_ms() const {
  int timeout = 1000;
  for (const auto& pair : pairs_) {
    for (const Direction& direction : pair->directions) {
      if (direction.pending.empty() || direction.not_before <= now()) continue;
      timeout = std::min(timeout, Deadline::at(direction.not_before).poll_timeout_ms());
    }
  }
  return timeout;
}

}  // namespace muster
