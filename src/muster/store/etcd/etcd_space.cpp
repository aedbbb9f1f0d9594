#include "muster/store/etcd/etcd_space.h"

#include <fmt/format.h>

#include <algorithm>

#include "muster/store/ttl_lock.h"

namespace muster {
namespace {

using etcd::Json;

constexpr int kLeaseSeconds = 60;
constexpr Duration kRenewAfter = 15s;
constexpr Duration kGoodFor = 40s;  // how long a renewed lease is used; the rest is a margin for clock drift

Result<int64_t> grant(EtcdClient& client, int64_t seconds, const Deadline& deadline) {
  MUSTER_ASSIGN(const Json answer,
                client.call("lease/grant", {{"TTL", std::to_string(seconds)}}, EtcdClient::Kind::kChanges, deadline));
  return etcd::number(answer, "ID");
}

// False if the lease has ended.
Result<bool> renew(EtcdClient& client, int64_t lease, const Deadline& deadline) {
  MUSTER_ASSIGN(const Json answer,
                client.call("lease/keepalive", {{"ID", std::to_string(lease)}}, EtcdClient::Kind::kReads, deadline));
  return etcd::number(etcd::part(answer, "result"), "TTL") > 0;
}

}  // namespace

std::string EtcdSpace::framed(const char* kind, const Key& key) const {
  return fmt::format("{}{}{:08x}{}", prefix_, kind, key.size(), key);
}

Result<Json> EtcdSpace::range(const EtcdRange& range, Json options, const Deadline& deadline) const {
  return client_->call("kv/range", etcd::range(range, std::move(options))["request_range"], EtcdClient::Kind::kReads,
                       deadline);
}

Result<Json> EtcdSpace::transact(std::vector<Json> compare, std::vector<Json> success, std::vector<Json> failure,
                                 const Deadline& deadline) const {
  const Json body = {{"compare", std::move(compare)}, {"success", std::move(success)}, {"failure", std::move(failure)}};
  return client_->call("kv/txn", body, EtcdClient::Kind::kChanges, deadline);
}

Result<int64_t> EtcdSpace::lease(const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  TimePoint now = steady_clock().now();
  // All callers must use the same lease. Otherwise some leases would never be renewed.
  const auto good = [&] { return lease_ != 0 && now < renewed_ + (asking_ ? kGoodFor : kRenewAfter); };
  while (!good() && asking_) {
    if (deadline.passed()) return fail(ErrorCode::kTimeout, "etcd did not renew a lease in time");
    asked_.wait_for(lock, std::min<Duration>(deadline.left(), 1s));
    now = steady_clock().now();
  }
  if (good()) return lease_;
  asking_ = true;
  const int64_t held = lease_;
  lock.unlock();
  auto lease = renewed_lease(held, deadline);
  lock.lock();
  asking_ = false;
  if (lease) {
    lease_ = *lease;
    renewed_ = now;
  }
  asked_.notify_all();
  return lease;
}

Result<int64_t> EtcdSpace::renewed_lease(int64_t held, const Deadline& deadline) const {
  if (held != 0) {
    MUSTER_ASSIGN(const bool alive, renew(*client_, held, deadline));
    if (alive) return held;
  }
  return grant(*client_, kLeaseSeconds, deadline);
}

Result<std::unique_ptr<TtlLock>> etcd_claim(const EtcdSpace& space, const Key& name, ByteView value,
                                            Duration time_to_live, const Deadline& deadline) {
  const std::string key = space.claim(name);
  const std::shared_ptr<EtcdClient> client = space.client();
  const TimePoint asked = steady_clock().now();
  // etcd's leases are whole seconds, and may be longer than requested. The holder counts only the requested time.
  MUSTER_ASSIGN(const int64_t lease,
                grant(*client, std::chrono::ceil<std::chrono::seconds>(time_to_live).count(), deadline));
  const auto release = [client, lease](const Deadline& until) {
    (void)client->call("lease/revoke", {{"ID", std::to_string(lease)}}, EtcdClient::Kind::kChanges, until);
  };
  const auto taken = space.transact({etcd::unchanged(key, 0)}, {etcd::put(key, value, lease)}, {}, deadline);
  if (taken && etcd::succeeded(*taken)) {
    return std::make_unique<RenewedTtlLock>(
        RenewedTtlLock::Store{[client, lease](const Deadline& until) { return renew(*client, lease, until); }, release},
        asked, time_to_live);
  }
  release(deadline);
  if (!taken) return tl::unexpected(taken.error());
  return lock_is_held(name);
}

}  // namespace muster
