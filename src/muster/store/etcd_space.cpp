#include "muster/store/etcd_space.h"

#include <fmt/format.h>

#include "muster/base/random.h"
#include "muster/store/claim.h"

namespace muster {
namespace {

using etcd::Json;

constexpr int kLeaseSeconds = 60;
constexpr Duration kRenewAfter = 15s;

Result<int64_t> grant(EtcdClient& client, int64_t seconds, const Deadline& deadline) {
  MUSTER_ASSIGN(const Json answer,
                client.call("lease/grant", {{"TTL", std::to_string(seconds)}}, EtcdClient::Kind::kChanges, deadline));
  return etcd::number(answer, "ID");
}

// False when there is no such lease any more.
Result<bool> renew(EtcdClient& client, int64_t lease, const Deadline& deadline) {
  MUSTER_ASSIGN(const Json answer,
                client.call("lease/keepalive", {{"ID", std::to_string(lease)}}, EtcdClient::Kind::kReads, deadline));
  return etcd::number(etcd::part(answer, "result"), "TTL") > 0;
}

}  // namespace

std::string new_id() {
  Bytes id(16);
  fill_unguessable(id);
  return to_hex(id);
}

std::string EtcdSpace::framed(const char* kind, const Key& key) const {
  return fmt::format("{}{}{:08x}{}", prefix_, kind, key.size(), key);
}

Result<Json> EtcdSpace::range(const EtcdRange& range, Json options, const Deadline& deadline) const {
  return client_->call("kv/range", etcd::range(range, std::move(options))["request_range"], EtcdClient::Kind::kReads,
                       deadline);
}

Result<Json> EtcdSpace::transact(const Json& transaction, const Deadline& deadline) const {
  return client_->call("kv/txn", transaction, EtcdClient::Kind::kChanges, deadline);
}

Result<int64_t> EtcdSpace::lease(const Deadline& deadline) {
  const std::lock_guard lock(mutex_);
  const TimePoint now = steady_clock().now();
  if (lease_ != 0 && now < renewed_ + kRenewAfter) return lease_;
  bool alive = false;
  if (lease_ != 0) {
    MUSTER_ASSIGN(alive, renew(*client_, lease_, deadline));
  }
  if (!alive) {
    MUSTER_ASSIGN(lease_, grant(*client_, kLeaseSeconds, deadline));
  }
  renewed_ = now;
  return lease_;
}

Result<std::unique_ptr<Claim>> etcd_claim(const EtcdSpace& space, const std::shared_ptr<EtcdClient>& client,
                                          const Key& name, ByteView value, Duration time_to_live,
                                          const Deadline& deadline) {
  const std::string key = space.claim(name);
  const TimePoint asked = steady_clock().now();
  // etcd counts seconds, and may give more of them than it was asked for: the holder counts on what it asked for.
  MUSTER_ASSIGN(const int64_t lease,
                grant(*client, std::chrono::ceil<std::chrono::seconds>(time_to_live).count(), deadline));
  const auto release = [client, lease](const Deadline& until) {
    (void)client->call("lease/revoke", {{"ID", std::to_string(lease)}}, EtcdClient::Kind::kChanges, until);
  };
  const auto taken =
      space.transact(etcd::transaction({etcd::unchanged(key, 0)}, {etcd::put(key, value, lease)}), deadline);
  if (taken && etcd::part(*taken, "succeeded").is_boolean()) {
    return std::make_unique<RenewedClaim>(
        RenewedClaim::Store{[client, lease](const Deadline& until) { return renew(*client, lease, until); }, release},
        asked, time_to_live);
  }
  release(deadline);
  if (!taken) return tl::unexpected(taken.error());
  return fail(ErrorCode::kAlreadyExists, fmt::format("the claim \"{}\" is held by another", name));
}

}  // namespace muster
