#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "muster/torch/rpc/codec.h"
#include "muster/torch/rpc/references.h"
#include "muster/torch/rpc/remote_error.h"

namespace muster::rpc {

/// True for types that can be sent (codec.h).
template <class T>
concept Writable = requires(ValueWriter& out, const T& value) {
  Codec<T>::write(out, value);
};

/// Throws ArgumentException with this message if T cannot be sent.
template <class T>
void write_or_refuse(ValueWriter& out, const T& value, const char* message) {
  if constexpr (Writable<T>) {
    write(out, value);
  } else {
    throw_error(Error{ErrorCode::kInvalidArgument, message});
  }
}

/// The value of a reference at its owner.
template <class T>
class TypedValue final : public WritableValue {
 public:
  explicit TypedValue(T given) : value(std::move(given)) {}
  void write(ValueWriter& out) const override {
    write_or_refuse(out, value, "the value of this reference cannot travel");
  }
  T value;
};

/// Reads a message with one value.
template <class T>
T read_message(const Message& message, RefService& refs, const ContextPtr& context) {
  ValueReader in(message, &refs, RefService::kReplied, context);
  auto value = read<T>(in);
  in.finish();
  return value;
}

/// A reference to a value at one worker, its owner. It can be an argument or a result of a call, also between C++ and
/// Python. Thread-safe; copies refer to the same value. The value lives until no worker holds a reference to it.
template <class T>
class RRef {
 public:
  RRef(RefPtr ref, std::optional<Future> creation) : ref_(std::move(ref)), creation_(std::move(creation)) {}

  const std::string& owner() const { return ref_->owner(); }
  bool is_owner() const { return ref_->is_owner(); }
  const RefPtr& ref() const { return ref_; }

  /// Waits until there is a value. Throws as to_here() does.
  void wait(const CallOptions& options = {}) const {
    const CallResult ready = wait_for_value(*ref_, after_creation(options)).wait();
    if (!ready) throw_call_error(ready.error());
  }
  /// Waits for the value, and returns a copy. Throws what the function threw that should have made it.
  T to_here(const CallOptions& options = {}) const {
    const CallOptions left = after_creation(options);
    const ContextPtr context = CurrentContext::current();
    const CallResult result = fetch(*ref_, left, context).wait();
    if (!result) throw_call_error(result.error());
    return read_message<T>(*result, *ref_->service(), context);
  }
  /// The value itself, at the owner, for as long as the pointer lives. Waits until there is one. Its users must
  /// synchronize themselves. Throws ArgumentException at other workers, or if the value has another type.
  std::shared_ptr<T> local_value(const CallOptions& options = {}) const {
    if (!is_owner()) throw_error(Error{ErrorCode::kInvalidArgument, ref_->to_string() + " is not here: use to_here()"});
    wait(options);
    const auto value = std::dynamic_pointer_cast<TypedValue<T>>(value_or_throw(ref_->service()->value(ref_->id())));
    if (!value) throw_error(Error{ErrorCode::kInvalidArgument, ref_->to_string() + " has a value of another type"});
    return {value, &value->value};
  }

 private:
  /// Waits for the call that makes the value. Returns the options with the time that is left.
  CallOptions after_creation(CallOptions options) const {
    if (!creation_) return options;
    const Deadline deadline = Deadline::after(options.timeout);
    if (!creation_->wait_until(deadline)) {
      throw_error(Error{ErrorCode::kTimeout, ref_->to_string() + " has no value yet: the call that makes it runs"});
    }
    if (const CallResult& created = creation_->wait(); !created) throw_call_error(created.error());
    options.timeout = std::max(deadline.left(), Duration(std::chrono::milliseconds(1)));
    return options;
  }

  RefPtr ref_;
  std::optional<Future> creation_;  ///< the call that makes the value, at the worker that has called
};

template <class T>
struct Codec<RRef<T>> {
  static void write(ValueWriter& out, const RRef<T>& value) { out.put_ref(value.ref()); }
  static RRef<T> read(ValueReader& in) {
    in.expect(Tag::kRef);
    return {in.ref_value(), std::nullopt};
  }
};

}  // namespace muster::rpc
