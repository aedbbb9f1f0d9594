#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace muster::rpc {

/// A release is sent again if its connection breaks, because its answer may have been lost, or the release itself. The
/// owner must not count it twice: that would take a grant that came later. So each release has a number.
struct ReleaseNumber {
  uint64_t number = 0;
  uint64_t oldest = 0;  ///< the holder does not send releases with smaller numbers any more
};

/// The releases of one holder that are not answered yet. Not thread-safe.
class SentReleases {
 public:
  ReleaseNumber begin(const std::string& owner) {
    std::set<uint64_t>& open = open_[owner];
    open.insert(++last_);
    return {last_, *open.begin()};
  }
  /// It was answered, or is given up.
  void end(const std::string& owner, uint64_t number) {
    const auto found = open_.find(owner);
    if (found == open_.end()) return;
    found->second.erase(number);
    if (found->second.empty()) open_.erase(found);
  }
  bool empty() const { return open_.empty(); }

 private:
  std::map<std::string, std::set<uint64_t>> open_;  ///< by owner
  uint64_t last_ = 0;
};

/// The releases that an owner has counted. Not thread-safe.
class CountedReleases {
 public:
  /// True if the release must be counted now. `holder`: the id of the worker that sent it, which no other worker has.
  bool insert(int holder, const ReleaseNumber& release) {
    Holder& counted = holders_[holder];
    if (release.oldest > counted.oldest) {
      counted.oldest = release.oldest;
      counted.numbers.erase(counted.numbers.begin(), counted.numbers.lower_bound(release.oldest));
    }
    if (release.number < counted.oldest || !counted.numbers.insert(release.number).second) return false;
    if (counted.numbers.size() > kMaxNumbers) {
      // What is smaller, and arrives only now, is not counted: the lease ends it.
      counted.oldest = *counted.numbers.begin() + 1;
      counted.numbers.erase(counted.numbers.begin());
    }
    return true;
  }

 private:
  static constexpr size_t kMaxNumbers = 65'536;
  struct Holder {
    uint64_t oldest = 0;
    std::set<uint64_t> numbers;  ///< counted, from `oldest` on
  };
  std::map<int, Holder> holders_;
};

}  // namespace muster::rpc
