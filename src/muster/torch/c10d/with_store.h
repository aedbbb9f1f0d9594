#pragma once

#include <memory>
#include <utility>

#include "muster/group/group.h"

namespace muster {

/// The group, with the store that it was formed in: it may look for further ranks there as long as it lives. Shared, as
/// whoever uses the group is.
inline std::shared_ptr<Group> with_store(std::shared_ptr<Store> store, std::unique_ptr<Group> group) {
  const auto both = std::make_shared<std::pair<std::shared_ptr<Store>, std::unique_ptr<Group>>>();
  both->first = std::move(store);
  both->second = std::move(group);  // of a pair, the second goes first
  return {both, both->second.get()};
}

}  // namespace muster
