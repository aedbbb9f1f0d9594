#include "cases.h"

#include <algorithm>

namespace muster::load {

Result<Fleet> connect_all(const Setting& setting) {
  MUSTER_ASSIGN(Fleet fleet, Fleet::create(!setting.echo));
  MUSTER_TRY(fleet.connect(setting.server, setting.connections, setting.deadline));
  return fleet;
}

Bytes value_of(const Setting& setting) { return Bytes(setting.value_bytes, 'v'); }

double seconds_since(TimePoint begin) { return std::chrono::duration<double>(steady_clock().now() - begin).count(); }

double quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  const auto at = static_cast<ptrdiff_t>(share * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[static_cast<size_t>(at)];
}

}  // namespace muster::load
