#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace muster {

/// Which gradients of the current backward have arrived, and in which order: the buckets are rebuilt once in that
/// order.
class GradientArrivals {
 public:
  explicit GradientArrivals(size_t count) : arrived_(count) {}

  void begin_backward(bool record_order) {
    std::fill(arrived_.begin(), arrived_.end(), 0);
    count_ = 0;
    recording_ = record_order;
    order_.clear();
  }
  /// False if this gradient has arrived before.
  bool mark(size_t index) {
    if (std::exchange(arrived_[index], 1) != 0) return false;
    ++count_;
    if (recording_) order_.push_back(index);
    return true;
  }

  bool has_arrived(size_t index) const { return arrived_[index] != 0; }
  bool any() const { return count_ > 0; }
  bool all() const { return count_ == arrived_.size(); }

  /// The recorded order; usable once it has all gradients.
  const std::vector<size_t>& order() const { return order_; }
  bool has_order() const { return order_.size() == arrived_.size(); }
  void set_order(std::vector<size_t> order) { order_ = std::move(order); }

 private:
  std::vector<uint8_t> arrived_;  ///< by parameter
  size_t count_ = 0;
  bool recording_ = false;
  std::vector<size_t> order_;
};

}  // namespace muster
