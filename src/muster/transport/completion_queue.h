#pragma once

#include "muster/transport/fifo.h"
#include "muster/transport/link.h"

namespace muster {

/// Completions that wait to be called. A link first changes its state, then calls back from here. So a completion may
/// start operations on the link, close it or destroy it, and a chain of operations that complete inline is a loop, not
/// a recursion.
class CompletionQueue {
 public:
  CompletionQueue() = default;
  CompletionQueue(const CompletionQueue&) = delete;
  CompletionQueue& operator=(const CompletionQueue&) = delete;
  ~CompletionQueue() {
    if (destroyed_ != nullptr) *destroyed_ = true;
  }

  void push(Completion completion, Result<> result) {
    if (!muted_ && completion) entries_.push({std::move(completion), std::move(result)});
  }

  /// Calls back in order. Does nothing inside another run() of the same queue, which continues. May destroy the owner.
  void run() {
    if (destroyed_ != nullptr) return;
    bool destroyed = false;
    destroyed_ = &destroyed;
    while (!entries_.empty()) {
      call(entries_.pop());
      if (destroyed) return;
    }
    destroyed_ = nullptr;
  }

  /// For the owner's destructor: calls back everything now, also inside run().
  void drain() {
    while (!entries_.empty()) call(entries_.pop());
  }

  /// Drops all completions, also later ones.
  void mute() {
    muted_ = true;
    entries_ = {};
  }

 private:
  struct Entry {
    Completion completion;
    Result<> result;
  };
  static void call(Entry entry) { entry.completion(std::move(entry.result)); }

  Fifo<Entry> entries_;
  bool* destroyed_ = nullptr;  // set while run() is on the stack
  bool muted_ = false;
};

}  // namespace muster
