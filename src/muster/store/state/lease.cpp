#include "muster/store/state/lease.h"

#include <algorithm>
#include <utility>

namespace muster {

bool LeaseTable::leasable(const Key& key) const {
  if (leases_ >= kMaxLeases) return false;
  const auto found = records_.find(key);
  return found == records_.end() || found->second.leasable();
}

bool LeaseTable::grant(const Key& key, ClientId holder) {
  if (leases_ >= kMaxLeases) return false;
  Record& record = records_[key];
  if (!record.leasable()) return false;
  if (record.idle) {
    idle_.erase(*record.idle);
    record.idle.reset();
  }
  Client& client = clients_[holder];
  const auto position = std::lower_bound(record.holders.begin(), record.holders.end(), Holder{holder, 0});
  if (position == record.holders.end() || position->client != holder) {
    record.holders.insert(position, {holder, client.term});
    ++leases_;
    ++client.leases;
  } else if (position->term != client.term) {
    position->term = client.term;
    --client.ended;
    --ended_;
    ++client.leases;
  }
  return true;
}

// Updates the counts when a lease is removed.
void LeaseTable::remove_lease(const Holder& holder) {
  const auto found = clients_.find(holder.client);
  Client& client = found->second;
  --leases_;
  if (holder.term == client.term) {
    --client.leases;
  } else {
    --client.ended;
    --ended_;
  }
  if (client.leases == 0 && client.ended == 0) clients_.erase(found);  // no lease refers to the client's term any more
}

size_t LeaseTable::remove_ended(Record& record) {
  return std::erase_if(record.holders, [this](const Holder& holder) {
    if (clients_.at(holder.client).term == holder.term) return false;
    remove_lease(holder);
    return true;
  });
}

bool LeaseTable::recall(const Key& key, Replies& out) {
  const auto found = records_.find(key);
  if (found == records_.end()) return true;
  Record& record = found->second;
  if (record.recalling) return false;
  remove_ended(record);
  if (record.holders.empty()) {
    make_idle(found);
    return true;
  }
  record.recalling = true;
  ++record.recalls;
  for (const Holder& holder : record.holders) {
    owed_[holder.client].insert(key);
    out.push_back({.client = holder.client, .keys = {key}, .recall = true});
  }
  return false;
}

bool LeaseTable::release(const Key& key, ClientId holder) {
  const auto found = records_.find(key);
  if (found == records_.end()) return false;
  Record& record = found->second;
  std::erase_if(record.holders, [&](const Holder& lease) {
    if (lease.client != holder) return false;
    remove_lease(lease);
    return true;
  });
  if (const auto owed = owed_.find(holder); owed != owed_.end()) {
    owed->second.erase(key);
    if (owed->second.empty()) owed_.erase(owed);
  }
  if (!record.holders.empty()) return false;
  const bool freed = std::exchange(record.recalling, false);
  make_idle(found);
  return freed;
}

void LeaseTable::revoke(ClientId holder, std::vector<Key>& freed) {
  const auto found = clients_.find(holder);
  if (found == clients_.end()) return;
  Client& client = found->second;
  ++client.term;
  ended_ += client.leases;
  client.ended += std::exchange(client.leases, 0);
  if (const auto owed = owed_.extract(holder); !owed.empty()) {
    for (const Key& key : owed.mapped()) {
      if (release(key, holder)) freed.push_back(key);
    }
  }
  if (ended_ > std::max(kMaxEnded, leases_ / 2)) sweep();
}

// Removes the record of a key without holders. If the key was recalled before, keeps the record for a while.
void LeaseTable::make_idle(Records::iterator record) {
  if (record->second.recalls == 0) {
    records_.erase(record);
  } else if (!record->second.idle) {
    record->second.idle = idle_.insert(idle_.end(), record->first);
    forget_idle();
  }
}

void LeaseTable::forget_idle() {
  while (idle_.size() > kMaxIdle) {
    records_.erase(idle_.front());
    idle_.pop_front();
  }
}

// While a key is being recalled, all its holders are current, because revoke() releases the keys that a holder owes. So
// the sweep never removes the last holder of such a key.
void LeaseTable::sweep() {
  for (auto it = records_.begin(); it != records_.end();) {
    const auto record = it++;
    if (remove_ended(record->second) == 0 || !record->second.holders.empty()) continue;
    if (record->second.recalls == 0) {
      records_.erase(record);
    } else {
      record->second.idle = idle_.insert(idle_.end(), record->first);
    }
  }
  forget_idle();
}

}  // namespace muster
