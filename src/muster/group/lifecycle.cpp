// Functions of Group that form new groups.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "muster/base/hash.h"
#include "muster/group/group.h"

namespace muster {
namespace {

Result<> check_members(const std::vector<Rank>& ranks, int size, const char* what) {
  std::set<Rank> seen;
  for (const Rank rank : ranks) {
    if (rank < 0 || rank >= size) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{} rank {}, but the group's ranks are 0 to {}", what, rank, size - 1));
    }
    if (!seen.insert(rank).second) {
      return fail(ErrorCode::kInvalidArgument, fmt::format("{} rank {} twice", what, rank));
    }
  }
  return {};
}

}  // namespace

GroupOptions Group::inherited_options() const {
  GroupOptions inherited = options();
  inherited.timeout = timeout();
  inherited.arena = arena();
  return inherited;
}

Result<std::unique_ptr<Group>> Group::form_child(Store& store, const std::vector<Rank>& /*ranks*/,
                                                 const GroupSpec& child) {
  return form(store, child, inherited_options());
}

Result<std::unique_ptr<Group>> Group::form_merged(Store& store, const GroupSpec& merged) {
  return form(store, merged, inherited_options());
}

/// This rank must be one of `ranks`.
Result<std::unique_ptr<Group>> Group::form_among(Store& store, const std::vector<Rank>& ranks,
                                                 const std::string& name) {
  const GroupSpec& self = membership();
  const GroupSpec child{.rank = static_cast<Rank>(std::ranges::find(ranks, self.rank) - ranks.begin()),
                        .size = static_cast<int>(ranks.size()),
                        .name = fmt::format("{}/{}", self.name, name),
                        .generation = self.generation};
  return form_child(store, ranks, child);
}

Result<std::unique_ptr<Group>> Group::duplicate(const std::string& name) {
  GroupSpec same = membership();
  same.name = fmt::format("{}/{}", same.name, name);
  return form_duplicate(same);
}

Result<std::unique_ptr<Group>> Group::split(Store& store, const std::vector<Rank>& ranks, const std::string& name) {
  MUSTER_TRY(check_members(ranks, membership().size, "a part of a group names"));
  if (std::ranges::count(ranks, membership().rank) == 0) return nullptr;
  return form_among(store, ranks, name);
}

Result<std::unique_ptr<Group>> Group::split(Store& store, int color, int key, const std::string& name) {
  const size_t size = membership().size;
  std::vector<int32_t> mine{color, key}, all(2 * size);
  MUSTER_TRY(all_gather({mine.data(), 2, Dtype::kInt32}, {all.data(), 2 * size, Dtype::kInt32}).result());
  if (color < 0) return nullptr;
  std::vector<Rank> ranks;
  for (size_t rank = 0; rank < size; ++rank) {
    if (all[2 * rank] == color) ranks.push_back(static_cast<Rank>(rank));
  }
  std::stable_sort(ranks.begin(), ranks.end(), [&](Rank a, Rank b) { return all[2 * a + 1] < all[2 * b + 1]; });
  return form_among(store, ranks, fmt::format("{}/{}", name, color));
}

Result<std::unique_ptr<Group>> Group::merge(Store& store, const GroupSpec& membership) {
  return form_merged(store, membership);
}

Result<std::unique_ptr<Group>> Group::shrink(Store& store, const std::vector<Rank>& excluded, bool abort_first) {
  const GroupSpec& self = membership();
  MUSTER_TRY(check_members(excluded, self.size, "shrinking excludes"));
  const std::set<Rank> out(excluded.begin(), excluded.end());
  if (out.empty()) return fail(ErrorCode::kInvalidArgument, "shrinking needs at least one rank to exclude");
  if (out.contains(self.rank)) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("rank {} is excluded; only the ranks that stay call shrink", self.rank));
  }
  if (abort_first) {
    abort(Error{ErrorCode::kAborted, fmt::format("group \"{}\" is being shrunk", self.name), self.rank, {}});
  }
  // The result is ignored: an operation that cannot succeed ends at its own deadline.
  (void)wait_for_pending(Deadline::after(timeout()));
  std::vector<Rank> stay(self.size);
  std::iota(stay.begin(), stay.end(), 0);
  std::erase_if(stay, [&](Rank rank) { return out.contains(rank); });
  // The name contains a hash of the list. So ranks that exclude different ranks form different groups.
  return form_among(store, stay, fmt::format("shrunk-{}-to-{:016x}", ++shrunk_, fnv1a(stay)));
}

}  // namespace muster
