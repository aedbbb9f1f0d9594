#include "storm.h"

#include <fmt/format.h>

#include "muster/store/server/backend.h"
#include "root_work.h"

namespace muster::load {
namespace {

class Job {
 public:
  Job(const Setting& setting, const Storm& storm, Loop& loop)
      : prefix_(setting.prefix), peers_(storm.peers), loop_(loop), position_(storm.peers.workers) {}

  Result<> connect(const Storm& storm, const Deadline& deadline) {
    StoreServerOptions options;
    MUSTER_ASSIGN(options.credentials.secret, secret_of_job());
    options.tiered = true;
    for (size_t node = 0; node < peers_.nodes(); ++node) {
      options.upstream = storm.urls[node % storm.urls.size()];
      MUSTER_ASSIGN(proxies_.emplace_back(),
                    upstream_backend(loop_, options, deadline, [this](Replies&& replies) { deliver(replies); }));
      // Links that are there want signs of life. So many proxies share this thread that their turns must be short.
      if (node % kNodesPerTurn == 0) loop_.poll();
    }
    return {};
  }

  Result<> run(const Deadline& deadline) {
    for (size_t rank = 0; rank < peers_.workers && !error_; ++rank) {
      advance(rank);
      if (rank % (kNodesPerTurn * peers_.workers_per_node) == 0) loop_.poll();
    }
    MUSTER_TRY(loop_.run_until([this] { return done_ == peers_.workers || error_; }, deadline));
    if (error_) return tl::unexpected(*error_);
    return {};
  }

 private:
  void deliver(const Replies& replies) {
    for (const Reply& reply : replies) {
      if (!reply.status && !error_) error_ = reply.status.error().in(fmt::format("worker {}", reply.client));
      if (!error_) advance(reply.client);
    }
  }

  void advance(size_t rank) {
    const size_t position = position_[rank]++;
    if (position > last_position(rank)) {
      ++done_;
      return;
    }
    proxies_[rank / peers_.workers_per_node]->submit(request(rank, position), rank);
  }

  size_t last_position(size_t rank) const { return 2 + 3 * peers_.count(rank); }

  // ADD, SET, of every peer WAIT, WAIT and GET, BARRIER.
  Request request(size_t rank, size_t position) const {
    const RequestId id = position + 1;
    if (position == 0) return {StoreOperation::kAdd, id, {prefix_ + "/init/"}, {}, 1};
    if (position == 1) return {StoreOperation::kSet, id, {address_key(rank)}, {Bytes(kAddressBytes, 'a')}};
    if (position == last_position(rank)) {
      return {StoreOperation::kBarrier, id, {prefix_ + "/barrier"}, {}, static_cast<int64_t>(peers_.workers)};
    }
    const Key key = address_key(peers_.peer(rank, (position - 2) / 3));
    if ((position - 2) % 3 < 2) return {StoreOperation::kWait, id, {key}};
    Request get{StoreOperation::kGet, id, {key}};
    get.immediate = true;
    return get;
  }

  Key address_key(size_t rank) const { return fmt::format("{}/default_pg/0//cpu//0/{}", prefix_, rank); }

  static constexpr size_t kAddressBytes = 170;
  static constexpr size_t kNodesPerTurn = 32;

  const std::string prefix_;
  const Peers peers_;
  Loop& loop_;
  std::vector<std::unique_ptr<Backend>> proxies_;  // by node
  std::vector<uint32_t> position_;                 // by rank: of its next request
  size_t done_ = 0;
  std::optional<Error> error_;
};

}  // namespace

Result<Figures> measure_storm(const Setting& setting, const Storm& storm) {
  MUSTER_ASSIGN(const auto loop, Loop::create());
  MUSTER_ASSIGN(RootMeter meter, RootMeter::create(storm.root_url, setting.pid, setting.deadline));
  const TimePoint begin = steady_clock().now();
  Job job(setting, storm, *loop);
  MUSTER_TRY(job.connect(storm, setting.deadline));
  const Duration connected = steady_clock().now() - begin;
  MUSTER_TRY(job.run(setting.deadline));
  const Duration time = steady_clock().now() - begin;
  MUSTER_ASSIGN(const RootWork work, meter.work());
  Figures figures = figures_of(work, time);
  figures["connecting"] = std::chrono::duration<double>(connected).count();
  return figures;
}

}  // namespace muster::load
