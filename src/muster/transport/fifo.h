#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace muster {

/// A queue that allocates nothing while it is empty. A std::deque takes 500 bytes; a simulated world has 100,000
/// queues.
template <class T>
class Fifo {
 public:
  bool empty() const { return head_ == items_.size(); }
  size_t size() const { return items_.size() - head_; }
  T& front() { return items_[head_]; }
  const T& front() const { return items_[head_]; }
  const T& back() const { return items_.back(); }
  void push(T item) { items_.push_back(std::move(item)); }

  T pop() {
    T item = std::move(items_[head_++]);
    if (empty()) {
      items_.clear();
      head_ = 0;
    } else if (head_ >= 64 && head_ * 2 > items_.size()) {
      items_.erase(items_.begin(), items_.begin() + static_cast<std::ptrdiff_t>(head_));
      head_ = 0;
    }
    return item;
  }

 private:
  std::vector<T> items_;
  size_t head_ = 0;
};

}  // namespace muster
