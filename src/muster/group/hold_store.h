#pragma once

#include <memory>
#include <utility>

#include "muster/group/group.h"

namespace muster {

/// Returns the group as a pointer that also keeps its store alive, because the group may look up further ranks there.
inline std::shared_ptr<Group> hold_store(std::shared_ptr<Store> store, std::unique_ptr<Group> group) {
  const auto both = std::make_shared<std::pair<std::shared_ptr<Store>, std::unique_ptr<Group>>>();
  both->first = std::move(store);
  both->second = std::move(group);  // a pair destroys its second member first
  return {both, both->second.get()};
}

}  // namespace muster
