#pragma once

#include <functional>
#include <memory>
#include <string>

#include "muster/torch/backend.h"
#include "muster/torch/hooks.h"

namespace muster::python {

/// The same, if it is one of muster's; throws c10::ValueError for others.
c10::intrusive_ptr<ProcessGroupMuster> muster_backend(const c10::intrusive_ptr<c10d::Backend>& backend);

/// The group of `backend`, which lives as long as it is held.
inline std::shared_ptr<Group> group_of(const c10::intrusive_ptr<ProcessGroupMuster>& backend) {
  return {&backend->group(), [backend](Group*) {}};
}

/// A communication hook as a Python program asks for one (muster.hooks): what makes it once the group is known.
class NativeHook {
 public:
  using Make = std::function<Hook(HookGroups)>;
  NativeHook(std::string name, bool two_steps, Make make)
      : name_(std::move(name)), two_steps_(two_steps), make_(std::move(make)) {}

  const std::string& name() const { return name_; }
  /// All ranks must call, without the GIL: some hooks form a group of their own.
  Hook make(const c10::intrusive_ptr<ProcessGroupMuster>& backend) const {
    const bool second = two_steps_ && backend->group().membership().size > 1;
    return make_({group_of(backend), second ? group_of(backend->duplicate()) : nullptr});
  }

 private:
  std::string name_;  ///< with its options
  bool two_steps_;
  Make make_;
};

}  // namespace muster::python
