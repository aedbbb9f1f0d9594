#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

// Parts of a Reducer's state that need neither ranks nor autograd.
namespace muster {

/// Records which gradients of the current backward have arrived, and in which order. The buckets are rebuilt once in
/// that order.
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

  /// The recorded order. Usable once it has all gradients.
  const std::vector<size_t>& order() const { return order_; }
  bool has_order() const { return order_.size() == arrived_.size(); }
  void drop_order() { order_.clear(); }

 private:
  std::vector<uint8_t> arrived_;  ///< by parameter
  size_t count_ = 0;
  bool recording_ = false;
  std::vector<size_t> order_;
};

/// Counts how often each parameter gets a gradient in a backward of a static graph. The first backward only counts. In
/// later backwards a gradient is complete after as many arrivals.
class StaticGraph {
 public:
  explicit StaticGraph(size_t count) : calls_(count) {}

  /// True until finish_counting().
  bool counting() const { return counting_; }
  void count(size_t index) { ++calls_[index].total; }
  /// Ends the first backward. Returns the parameters that got no gradient, ascending.
  std::vector<size_t> finish_counting() {
    counting_ = false;
    std::vector<size_t> unused;
    for (size_t i = 0; i < calls_.size(); ++i) {
      if (calls_[i].total == 0) unused.push_back(i);
    }
    return unused;
  }

  void begin_backward() {
    for (Calls& calls : calls_) calls.left = calls.total;
  }
  /// Arrivals that are still expected, in a backward after the first.
  int calls_left(size_t index) const { return calls_[index].left; }
  /// One gradient has arrived. True if it was the last one.
  bool take_call(size_t index) { return --calls_[index].left == 0; }

  void reset() {
    counting_ = true;
    std::fill(calls_.begin(), calls_.end(), Calls{});
  }

 private:
  struct Calls {
    int total = 0, left = 0;
  };
  bool counting_ = true;
  std::vector<Calls> calls_;  ///< by parameter
};

/// The factor that turns the next average over all ranks into an average over the ranks that still have data (join).
class JoinScale {
 public:
  void divide_by(int ranks, int size) { factor_ = static_cast<double>(size) / ranks; }
  /// The result of this all-reduce is the number of ranks with data.
  void divide_by_result_of(c10::intrusive_ptr<c10d::Work> work) { work_ = std::move(work); }
  /// `hook_divides`: a user's hook does its own division, as with torch's reducer, so the result of the all-reduce is
  /// ignored.
  double factor(int size, bool hook_divides) {
    if (work_ && !hook_divides) {
      work_->wait();
      divide_by(std::exchange(work_, nullptr)->result().front().item<int>(), size);
    }
    return factor_;
  }
  void reset() { *this = {}; }

 private:
  double factor_ = 1;
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace muster
