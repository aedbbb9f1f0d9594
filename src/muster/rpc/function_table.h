#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "muster/rpc/agent.h"

namespace muster::rpc {

/// A call may name its function "NAME#NOTE". Then the function NAME runs, and users see NOTE: the method that
/// "call the method of a reference" calls, for example.
inline constexpr char kNote = '#';
/// The end of a note that is longer than this is cut off by those who write it.
inline constexpr size_t kMaxNoteBytes = 256;
/// Of a name in a call: NAME.
std::string_view name_without_note(std::string_view called);
/// Of a name in a call: NOTE, or NAME if there is none.
std::string_view shown_name(std::string_view called);

/// The functions that other workers may call. Thread-safe.
class FunctionTable {
 public:
  /// kInvalidArgument for a name with kNote.
  Result<> add(const std::string& name, Handler handler, FunctionOptions options);
  Result<> add_fallback(Handler handler, FunctionOptions options);
  /// The options of the function that a call names; the default ones if there is no such function.
  FunctionOptions options_of(std::string_view called) const;
  /// Runs the function that the request names, and gives it the request without the note. If there is none, the call
  /// fails with kNotFound.
  void run(Request request, Responder responder) const;
  /// The names of the functions that have not returned, sorted, for a message.
  std::string running() const;

 private:
  struct Function {
    Function(Handler run, FunctionOptions with) : handler(std::move(run)), options(with) {}
    Handler handler;
    FunctionOptions options;
    mutable std::atomic<int> running = 0;  ///< relaxed: only counted
  };
  // Shared, because a function runs without the lock.
  using FunctionPtr = std::shared_ptr<const Function>;
  FunctionPtr find(const std::string& name) const;  ///< without a note
  std::string names() const;

  mutable std::mutex mutex_;  ///< guards the fields below
  std::unordered_map<std::string, FunctionPtr> functions_;
  FunctionPtr fallback_;
};

}  // namespace muster::rpc
