#pragma once

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "muster/group/group.h"
#include "muster/transport/fifo.h"

namespace muster {

/// Decides which message goes to which receive. It does not touch sockets or message buffers. `Receive` and `Message`
/// are pointer-like types; null means none.
///
/// Messages of one sender with one tag are matched in the order of their arrival. If several receives match a message,
/// the receive that was posted first takes it. A receive from any rank takes the message that arrived first. So
/// messages do not overtake each other, and no sender starves. Matching costs O(1). A receive from any rank costs
/// O(senders that have waiting messages with its tag). Source: the rules of MPI 4.1, section 3.5.
template <class Receive, class Message>
class Matcher {
 public:
  /// Returns the message that the receive takes, and removes it. Returns null if no message matches; the receive then
  /// waits.
  Message post(Rank from, uint32_t tag, Receive receive) {
    if (Message message = take(from, tag)) return message;
    receives_[key(from, tag)].push({++clock_, std::move(receive)});
    return nullptr;
  }

  /// Returns the receive that takes the message, and removes it. Returns null if no receive matches; the message is
  /// then kept as unexpected.
  Receive arrive(Rank from, uint32_t tag, Message message) {
    const auto own = receives_.find(key(from, tag));
    const auto any = receives_.find(key(kAnyRank, tag));
    if (own == receives_.end() && any == receives_.end()) {
      messages_[tag][from].push({++clock_, std::move(message)});
      return nullptr;
    }
    const bool takes_own =
        any == receives_.end() || (own != receives_.end() && own->second.front().when < any->second.front().when);
    return pop(receives_, takes_own ? own : any);
  }

  /// Removes a waiting receive. Returns false if the receive is not waiting.
  bool withdraw(Rank from, uint32_t tag, const Receive& receive) {
    const auto bin = receives_.find(key(from, tag));
    if (bin == receives_.end()) return false;
    return remove_if(
        bin->second, [&](const Receive& each) { return each == receive; }, [&] { receives_.erase(bin); });
  }

  /// Removes the unexpected messages of `from` for which `gone` returns true.
  template <class Predicate>
  void forget(Rank from, Predicate&& gone) {
    for (auto tag = messages_.begin(); tag != messages_.end();) {
      if (const auto bin = tag->second.find(from); bin != tag->second.end()) {
        remove_if(bin->second, gone, [&] { tag->second.erase(bin); });
      }
      tag = tag->second.empty() ? messages_.erase(tag) : std::next(tag);
    }
  }

 private:
  template <class T>
  struct Entry {
    uint64_t when = 0;
    T item;
  };
  using Receives = std::unordered_map<uint64_t, Fifo<Entry<Receive>>>;
  using Senders = std::map<Rank, Fifo<Entry<Message>>>;

  static uint64_t key(Rank from, uint32_t tag) { return uint64_t{tag} << 32 | static_cast<uint32_t>(from); }

  /// Pops the first item of a bin and erases the bin if it becomes empty. So a bin is never empty, and front() is safe.
  template <class Bins>
  static auto pop(Bins& bins, typename Bins::iterator bin) {
    auto item = std::move(bin->second.pop().item);
    if (bin->second.empty()) bins.erase(bin);
    return item;
  }

  Message take(Rank from, uint32_t tag) {
    const auto senders = messages_.find(tag);
    if (senders == messages_.end()) return nullptr;
    const auto arrival = [](const auto& sender) { return sender.second.front().when; };
    const auto bin =
        from == kAnyRank ? std::ranges::min_element(senders->second, {}, arrival) : senders->second.find(from);
    if (bin == senders->second.end()) return nullptr;
    Message message = pop(senders->second, bin);
    if (senders->second.empty()) messages_.erase(senders);
    return message;
  }

  template <class T, class Predicate, class Empty>
  static bool remove_if(Fifo<Entry<T>>& bin, Predicate&& gone, Empty&& emptied) {
    const size_t before = bin.size();
    Fifo<Entry<T>> kept;
    while (!bin.empty()) {
      Entry<T> entry = bin.pop();
      if (!gone(entry.item)) kept.push(std::move(entry));
    }
    bin = std::move(kept);
    const bool removed = bin.size() < before;
    if (bin.empty()) emptied();
    return removed;
  }

  uint64_t clock_ = 0;
  Receives receives_;
  std::unordered_map<uint32_t, Senders> messages_;
};

}  // namespace muster
