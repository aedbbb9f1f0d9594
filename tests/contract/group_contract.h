#pragma once

#include <string>
#include <tuple>

#include "group/ranks.h"

namespace muster {

/// A kind of group, such as its transport: the name of the kind and the options of each rank.
struct GroupKind {
  std::string name;
  std::function<GroupOptions(Rank)> options;
  /// Runs the body at each rank of a group of `size`. By default the ranks are threads. If they are processes, each of
  /// them runs all tests.
  std::function<void(int size, const std::function<void(Group&)>& body)> run;
  bool has_bitwise_reductions = true;
};
inline std::ostream& operator<<(std::ostream& out, const GroupKind& kind) { return out << kind.name; }

/// Checks every collective against its plain definition, for groups of one kind in several sizes. Add a kind with
/// INSTANTIATE_TEST_SUITE_P(..., GroupContract, group_sizes(kind, sizes), group_name).
class GroupContract : public testing::TestWithParam<std::tuple<GroupKind, int>> {
 protected:
  const GroupKind& kind() const { return std::get<0>(GetParam()); }
  int size() const { return std::get<1>(GetParam()); }
  void run(const std::function<void(Group&)>& body) const {
    kind().run ? kind().run(size(), body) : test::run_group(size(), kind().options, body);
  }
};

inline auto group_sizes(const GroupKind& kind, const std::vector<int>& sizes) {
  return testing::Combine(testing::Values(kind), testing::ValuesIn(sizes));
}
inline std::string group_name(const testing::TestParamInfo<std::tuple<GroupKind, int>>& info) {
  return std::get<0>(info.param).name + std::to_string(std::get<1>(info.param));
}

}  // namespace muster
