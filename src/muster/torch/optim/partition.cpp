#include "muster/torch/optim/partition.h"

#include <algorithm>
#include <numeric>

namespace muster::optim {

std::vector<Rank> partition(const std::vector<size_t>& sizes, std::vector<size_t>& loads) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return sizes[a] > sizes[b]; });
  std::vector<Rank> owners(sizes.size());
  for (const size_t index : order) {
    const auto least = std::min_element(loads.begin(), loads.end());
    *least += sizes[index];
    owners[index] = static_cast<Rank>(least - loads.begin());
  }
  return owners;
}

}  // namespace muster::optim
