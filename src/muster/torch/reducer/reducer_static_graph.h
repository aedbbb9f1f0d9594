#pragma once

#include <algorithm>
#include <vector>

namespace muster {

/// How often each parameter gets a gradient in a backward of a static graph. The first backward only counts; in later
/// ones a gradient is complete after as many arrivals.
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

}  // namespace muster
