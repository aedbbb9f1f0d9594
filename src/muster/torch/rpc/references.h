#pragma once

#include <memory>
#include <string>
#include <utility>

#include "muster/rpc/agent.h"
#include "muster/rpc/ref_service.h"
#include "muster/torch/rpc/autograd.h"
#include "muster/torch/rpc/value.h"

namespace muster::rpc {

/// The value of a reference, in C++ or in Python. Other workers get a copy of it.
class WritableValue : public RefValue {
 public:
  /// May throw.
  virtual void write(ValueWriter& out) const = 0;
};

/// The function that should have made the value has failed.
class FailedValue final : public RefValue {
 public:
  explicit FailedValue(CallError why) : why(std::move(why)) {}
  const CallError why;
};

/// Adds the functions behind fetch() and wait_for_value() to the agent.
Result<> add_fetch(const std::shared_ptr<RefService>& refs, const std::shared_ptr<Autograd>& autograd);
/// Gets a copy of the value of a reference, once there is one. In a context, gradients flow back to the owner.
Future fetch(const Ref& ref, const CallOptions& options, const ContextPtr& context);
/// Waits for the value without copying it: the result is empty.
Future wait_for_value(const Ref& ref, const CallOptions& options);

/// The function that makes the value of a reference. Its arguments by position are the reference's creator and number,
/// the name of a function, and the arguments of that by position and by name.
inline constexpr const char* kCreate = "muster.ref.create";
/// The name by which remote() calls it, with a note: users see the function that makes the value.
std::string creation_of(const std::string& function);
/// Begins its arguments, up to the name of the function. Those of the function, and an empty dict, must follow.
void begin_create(ValueWriter& out, const Ref& ref, const std::string& function);
/// Reads what begin_create() has written, and accepts the reference. Throws ErrorException if the creator is not the
/// caller.
std::pair<RefId, std::string> read_create(ValueReader& in, RefService& refs, const WorkerInfo& caller);
/// Reads the head of a list of so many parts.
void expect_parts(ValueReader& in, size_t count);

/// Takes note of the result of a call in a context when it arrives, whether it is read or not.
void track(const Future& future, const ContextPtr& context);

/// Calls a function with arguments that may hold references. Blocks while they are granted, which takes a round trip to
/// their owners if these are other workers. Throws if that fails.
Future call_with_refs(RefService& refs, const std::string& to, const std::string& function, ValueWriter arguments,
                      const CallOptions& options);
/// Sends a result that may hold references, once they are granted to `receiver`.
void reply_with_refs(RefService& refs, std::shared_ptr<Responder> responder, const std::string& receiver,
                     ValueWriter result);

}  // namespace muster::rpc
