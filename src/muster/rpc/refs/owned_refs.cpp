#include "muster/rpc/refs/owned_refs.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace muster::rpc {
namespace {

/// Holds what is on its way to the owner in a reply. No worker has this name.
constexpr const char* kArriving = "";

}  // namespace

void OwnedRefs::create(const RefId& id, const std::string& holder, TimePoint now) {
  Holder& creator = refs_[id].holders[holder];
  ++creator.grants;
  creator.expires = now + lease_;
}

bool OwnedRefs::claim(const RefId& id, TimePoint now) {
  if (!refs_.contains(id)) return false;
  create(id, self_, now);
  (void)release(id, kArriving, 1, now);
  return true;
}

Result<> OwnedRefs::grant(const RefId& id, const std::string& holder, const std::string& by, bool by_creator,
                          TimePoint now) {
  auto ref = refs_.find(id);
  if (ref == refs_.end()) {
    if (!by_creator) {
      return fail(ErrorCode::kNotFound,
                  fmt::format("worker \"{}\" does not own the reference {}.{} any more: nobody held it, or the worker "
                              "was started again",
                              self_, id.creator, id.number));
    }
    ref = refs_.try_emplace(id).first;
  }
  Holder& held = ref->second.holders[holder == self_ ? kArriving : holder];
  ++held.grants;
  held.expires = std::max(held.expires, now + lease_);
  held.granters.insert(by);
  return {};
}

std::shared_ptr<RefValue> OwnedRefs::release(const RefId& id, const std::string& holder, uint64_t grants,
                                             TimePoint now) {
  const auto found = refs_.find(id);
  if (found == refs_.end()) return nullptr;
  Ref& ref = found->second;
  const auto held = ref.holders.find(holder);
  if (held == ref.holders.end()) return nullptr;
  const uint64_t lapsed = std::min(held->second.lapsed, grants);
  held->second.lapsed -= lapsed;
  held->second.grants -= std::min(held->second.grants, grants - lapsed);
  if (held->second.grants > 0) return nullptr;
  if (held->second.lapsed == 0) ref.holders.erase(held);
  for (auto& [name, other] : ref.holders) {
    // The message of this granter was handled, so its receiver renews from now on.
    if (other.granters.erase(holder) != 0) other.expires = std::max(other.expires, now + lease_);
  }
  if (ref.is_held()) return nullptr;
  auto value = std::move(ref.value);
  refs_.erase(found);
  return value;
}

void OwnedRefs::renew(const RefId& id, const std::string& holder, uint64_t grants, TimePoint now) {
  const auto found = refs_.find(id);
  if (found == refs_.end()) return;
  Holder& held = found->second.holders[holder];
  held.lapsed -= std::min(held.lapsed, grants - std::min(held.grants, grants));
  held.grants = std::max(held.grants, grants);
  held.expires = now + lease_;
}

bool OwnedRefs::Ref::is_held() const {
  return std::ranges::any_of(holders, [](const auto& entry) { return entry.second.grants > 0; });
}

bool OwnedRefs::is_protected(const Ref& ref, const Holder& holder, TimePoint now) const {
  return std::ranges::any_of(holder.granters, [&](const std::string& name) {
    const auto granter = ref.holders.find(name);
    return granter != ref.holders.end() && granter->second.grants > 0 &&
           (name == self_ || granter->second.expires > now);
  });
}

std::vector<std::shared_ptr<RefValue>> OwnedRefs::expire(TimePoint now) {
  std::vector<std::shared_ptr<RefValue>> dropped;
  for (auto ref = refs_.begin(); ref != refs_.end();) {
    for (auto& [name, holder] : ref->second.holders) {
      if (name == self_ || holder.expires > now || is_protected(ref->second, holder, now)) continue;
      holder.lapsed += std::exchange(holder.grants, 0);
    }
    if (ref->second.is_held()) {
      ++ref;
      continue;
    }
    if (ref->second.value) dropped.push_back(std::move(ref->second.value));
    ref = refs_.erase(ref);
  }
  return dropped;
}

std::shared_ptr<RefValue> OwnedRefs::value(const RefId& id) const {
  const auto found = refs_.find(id);
  return found == refs_.end() ? nullptr : found->second.value;
}

void OwnedRefs::set_value(const RefId& id, std::shared_ptr<RefValue> value) {
  if (const auto found = refs_.find(id); found != refs_.end()) found->second.value = std::move(value);
}

}  // namespace muster::rpc
