#pragma once

#include <functional>
#include <memory>
#include <string>

#include "muster/torch/backend.h"
#include "muster/torch/hooks.h"

namespace muster::python {

/// Casts the backend; throws c10::ValueError if it is not muster's.
c10::intrusive_ptr<ProcessGroupMuster> muster_backend(const c10::intrusive_ptr<c10d::Backend>& backend);

/// The group of `backend`. The pointer keeps the backend alive.
inline std::shared_ptr<Group> group_of(const c10::intrusive_ptr<ProcessGroupMuster>& backend) {
  return {&backend->group(), [backend](Group*) {}};
}

/// A communication hook of muster.hooks with its options. The hook itself is created when the group is known.
class NativeHook {
 public:
  using Make = std::function<Hook(HookGroups)>;
  NativeHook(std::string name, bool two_phases, Make make)
      : name_(std::move(name)), two_phases_(two_phases), make_(std::move(make)) {}

  const std::string& name() const { return name_; }
  /// All ranks must call this, because some hooks form a group. Call it without the GIL.
  Hook make(const c10::intrusive_ptr<ProcessGroupMuster>& backend) const {
    const bool secondary = two_phases_ && backend->group().membership().size > 1;
    return make_({group_of(backend), secondary ? group_of(backend->duplicate()) : nullptr});
  }

 private:
  std::string name_;  ///< includes the options
  bool two_phases_;
  Make make_;
};

}  // namespace muster::python
