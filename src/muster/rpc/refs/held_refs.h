#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "muster/rpc/refs/ref_id.h"

namespace muster::rpc {

/// The references of other workers that this one holds. Not thread-safe. owned_refs.h explains the protocol.
class HeldRefs {
 public:
  struct Held {
    std::string owner;
    RefId id;
    uint64_t grants = 0;
  };

  /// A granted reference has arrived, or was created: one more handle, and one more grant.
  void receive(const std::string& owner, const RefId& id) {
    Entry& entry = refs_[{owner, id}];
    ++entry.handles;
    ++entry.grants;
  }
  /// One more handle in this process.
  void add_handle(const std::string& owner, const RefId& id) { ++refs_[{owner, id}].handles; }
  /// One handle less. Returns the number of grants that must be released: none while there are handles.
  uint64_t drop_handle(const std::string& owner, const RefId& id) {
    const auto found = refs_.find({owner, id});
    if (found == refs_.end() || --found->second.handles > 0) return 0;
    const uint64_t grants = found->second.grants;
    refs_.erase(found);
    return grants;
  }
  /// All references, sorted by owner.
  std::vector<Held> list() const {
    std::vector<Held> all;
    for (const auto& [key, entry] : refs_) all.push_back({key.first, key.second, entry.grants});
    return all;
  }
  size_t size() const { return refs_.size(); }

 private:
  struct Entry {
    uint64_t handles = 0;
    uint64_t grants = 0;
  };
  std::map<std::pair<std::string, RefId>, Entry> refs_;
};

}  // namespace muster::rpc
