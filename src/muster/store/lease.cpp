#include "muster/store/lease.h"

#include <algorithm>

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
  const Holder lease{holder, terms_.try_emplace(holder, 0).first->second};
  const auto place = std::lower_bound(record.holders.begin(), record.holders.end(), Holder{holder, 0});
  if (place != record.holders.end() && place->client == holder) {
    place->term = lease.term;
    return true;
  }
  record.holders.insert(place, lease);
  ++leases_;
  return true;
}

bool LeaseTable::holds(const Holder& holder) const {
  const auto term = terms_.find(holder.client);
  return term != terms_.end() && term->second == holder.term;
}

bool LeaseTable::recall(const Key& key, Replies& out) {
  const auto found = records_.find(key);
  if (found == records_.end()) return true;
  Record& record = found->second;
  if (record.recalling) return false;
  leases_ -= std::erase_if(record.holders, [this](const Holder& holder) { return !holds(holder); });
  if (record.holders.empty()) return true;
  record.recalling = true;
  ++record.recalls;
  for (const Holder& holder : record.holders) {
    owed_[holder.client].insert(key);
    Reply recall;
    recall.client = holder.client;
    recall.recall = true;
    recall.keys.push_back(key);
    out.push_back(std::move(recall));
  }
  return false;
}

// True if the last of the holders that were asked has given the key back.
bool LeaseTable::settle(Record& record) {
  if (!record.recalling || !record.holders.empty()) return false;
  record.recalling = false;
  return true;
}

bool LeaseTable::release(const Key& key, ClientId holder) {
  const auto found = records_.find(key);
  if (found == records_.end()) return false;
  Record& record = found->second;
  leases_ -= std::erase_if(record.holders, [&](const Holder& lease) { return lease.client == holder; });
  if (const auto owed = owed_.find(holder); owed != owed_.end()) {
    owed->second.erase(key);
    if (owed->second.empty()) owed_.erase(owed);
  }
  const bool freed = settle(record);
  if (record.holders.empty() && record.recalls == 0) records_.erase(found);
  return freed;
}

void LeaseTable::revoke(ClientId holder, std::vector<Key>& freed) {
  const auto term = terms_.find(holder);
  if (term == terms_.end()) return;
  ++term->second;
  const auto owed = owed_.extract(holder);
  if (owed.empty()) return;
  for (const Key& key : owed.mapped()) {
    if (release(key, holder)) freed.push_back(key);
  }
}

}  // namespace muster
