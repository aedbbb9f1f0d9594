#pragma once

#include <memory>
#include <string>

#include "muster/rpc/agent.h"
#include "muster/rpc/ref_service.h"
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

/// Adds the functions behind fetch() and wait_for_value() to an agent.
Result<> add_fetch(Agent& agent, const std::shared_ptr<RefService>& refs);
/// Gets a copy of the value of a reference, once there is one.
Future fetch(Agent& agent, const Ref& ref, const CallOptions& options);
/// Waits for the value without copying it: the result is empty.
Future wait_for_value(Agent& agent, const Ref& ref, const CallOptions& options);

/// Calls a function with arguments that may hold references. Blocks while they are granted, which takes a round trip to
/// their owners if these are other workers. Throws if that fails.
Future call_with_refs(Agent& agent, RefService& refs, const std::string& to, const std::string& function,
                      ValueWriter arguments, const CallOptions& options);
/// Sends a result that may hold references, once they are granted to `receiver`.
void reply_with_refs(RefService& refs, std::shared_ptr<Responder> responder, const std::string& receiver,
                     ValueWriter result);

}  // namespace muster::rpc
