#include "muster/launch/agent/former_address.h"

#include <condition_variable>
#include <mutex>
#include <thread>

#include "muster/launch/agent/node_store.h"
#include "muster/launch/rendezvous/rendezvous_messages.h"
#include "muster/store/store.h"

namespace muster {
namespace {

constexpr Duration kInterval = std::chrono::seconds(1);
constexpr Duration kAnswerTime = std::chrono::seconds(1);

}  // namespace

struct FormerAddress::Watch {
  const std::string host;
  const uint16_t port;
  const Bytes secret;
  const Key inbox;
  const std::string root_url;
  std::mutex mutex{};  // guards `stop`
  std::condition_variable stopped{};
  bool stop = false;

  void run() {
    std::unique_lock lock(mutex);
    while (!stop) {
      lock.unlock();
      const Result<> told = tell();
      lock.lock();
      if (!told && told.error().code == ErrorCode::kAuthentication) return;  // another job uses this address now
      stopped.wait_for(lock, kInterval, [this] { return stop; });
    }
  }

  Result<> tell() const {
    MUSTER_ASSIGN(const auto found, resolve(host, port));
    if (is_own(found.front())) return {};
    MUSTER_ASSIGN(const auto store, open_store(tcp_url(found.front()), secret, Deadline::after(kAnswerTime)));
    const NodeEvent move{.kind = NodeEvent::Kind::kMove, .root = root_url};
    return store->queue_push(inbox, encode(move), Deadline::after(kAnswerTime));
  }

  // The root may be at its first address again. That host may have several addresses.
  bool is_own(const Address& address) const {
    return is_local(address) && root_url.ends_with(":" + std::to_string(address.port()));
  }
};

FormerAddress::FormerAddress(const RunOptions& options, const Bytes& secret, const std::string& root_url)
    : watch_(new Watch{options.master_addr, options.master_port, secret, JobKeys(options.run_id).inbox(), root_url}) {
  // tidy: allow(detach) a name lookup cannot be cancelled; the thread owns its data
  std::thread([watch = watch_] { watch->run(); }).detach();
}

FormerAddress::~FormerAddress() {
  const std::lock_guard lock(watch_->mutex);
  watch_->stop = true;
  watch_->stopped.notify_all();
}

}  // namespace muster
