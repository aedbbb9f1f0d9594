#pragma once

#include <functional>
#include <memory>
#include <string>

#include "muster/torch/backend.h"
#include "muster/torch/hooks.h"

namespace muster::python {

/// Returns muster's backend; throws c10::ValueError for other backends.
c10::intrusive_ptr<ProcessGroupMuster> muster_backend(const c10::intrusive_ptr<c10d::Backend>& backend);

/// The group of `backend`. Keeps the backend alive.
inline std::shared_ptr<Group> group_of(const c10::intrusive_ptr<ProcessGroupMuster>& backend) {
  return {&backend->group(), [backend](Group*) {}};
}

/// A communication hook with its options (muster.hooks), which is made once the group is known.
class NativeHook {
 public:
  using Make = std::function<Hook(HookGroups)>;
  NativeHook(std::string name, bool two_steps, Make make)
      : name_(std::move(name)), two_steps_(two_steps), make_(std::move(make)) {}

  const std::string& name() const { return name_; }
  /// All ranks must call this, without the GIL: some hooks form a group.
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
