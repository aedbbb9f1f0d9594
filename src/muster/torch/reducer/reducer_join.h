#pragma once

#include <utility>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace muster {

/// Join: the factor that turns the next average over all ranks into one over the ranks that still have data.
class JoinScale {
 public:
  void divide_by(int ranks, int size) { factor_ = static_cast<double>(size) / ranks; }
  /// The result of this all-reduce is the number of ranks with data.
  void divide_by_result_of(c10::intrusive_ptr<c10d::Work> work) { work_ = std::move(work); }
  /// `hook_divides`: a hook of Python's divides as it likes, as with torch's reducer, so the all-reduce is ignored.
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
