// The grammar of Slurm's node lists:
//
//   list  = host *("," host)
//   host  = *(text / "[" range *("," range) "]")
//   range = number ["-" number]          leading zeros set the width of all numbers of the range

#include <fmt/format.h>

#include <algorithm>

#include "muster/launch/options/cluster.h"
#include "muster/launch/options/option_values.h"

namespace muster {
namespace {

constexpr size_t kMaxHosts = 1 << 20;
using Words = std::vector<std::string>;

bool add_range(std::string_view range, Words& words) {
  const size_t dash = std::min(range.find('-'), range.size());
  const std::string_view first = range.substr(0, dash);
  const auto low = to_number<uint32_t>(first);
  const auto high = dash < range.size() ? to_number<uint32_t>(range.substr(dash + 1)) : low;
  if (!low || !high || *high < *low || *high - *low >= kMaxHosts) return false;
  for (uint64_t number = *low; number <= *high; ++number) words.push_back(fmt::format("{:0{}}", number, first.size()));
  return true;
}

// Combines each prefix with each suffix.
bool append_each(Words& prefixes, const Words& suffixes) {
  if (suffixes.empty() || prefixes.size() > kMaxHosts / suffixes.size()) return false;
  Words all;
  for (const auto& prefix : prefixes)
    for (const auto& suffix : suffixes) all.push_back(prefix + suffix);
  prefixes = std::move(all);
  return true;
}

bool expand_host(std::string_view host, Words& hosts) {
  Words made = {""};
  while (!host.empty()) {
    const size_t bracket = std::min(host.find('['), host.size());
    if (!append_each(made, {std::string(host.substr(0, bracket))})) return false;
    host.remove_prefix(bracket);
    if (host.empty()) break;
    const size_t end = host.find(']');
    if (end == std::string_view::npos) return false;
    Words numbers;
    for (std::string_view ranges = host.substr(1, end - 1); !ranges.empty();) {
      const size_t comma = std::min(ranges.find(','), ranges.size());
      if (!add_range(ranges.substr(0, comma), numbers)) return false;
      ranges.remove_prefix(std::min(comma + 1, ranges.size()));
    }
    if (!append_each(made, numbers)) return false;
    host.remove_prefix(end + 1);
  }
  hosts.insert(hosts.end(), made.begin(), made.end());
  return hosts.size() <= kMaxHosts;
}

}  // namespace

Result<std::vector<std::string>> expand_nodelist(const std::string& list) {
  Words hosts;
  size_t begin = 0, depth = 0;
  for (size_t i = 0; i <= list.size(); ++i) {
    const char c = i < list.size() ? list[i] : ',';
    if (c == '[') ++depth;
    if (c == ']' && depth > 0) --depth;
    if (c != ',' || (depth > 0 && i < list.size())) continue;
    const std::string_view host = std::string_view(list).substr(begin, i - begin);
    if (host.empty() || !expand_host(host, hosts))
      return fail(ErrorCode::kInvalidArgument, fmt::format("'{}' is not a Slurm node list", list));
    begin = i + 1;
  }
  return hosts;
}

}  // namespace muster
