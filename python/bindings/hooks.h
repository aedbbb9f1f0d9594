#pragma once

#include <functional>
#include <memory>
#include <string>

#include "muster/torch/backend.h"
#include "muster/torch/hooks.h"

namespace muster::python {

/// Casts the backend; throws c10::ValueError if it is not muster's.
c10::intrusive_ptr<ProcessGroupMuster> muster_backend(const c10::intrusive_ptr<c10d::Backend>& backend);

/// The same, but raises a TypeError that names `user`, the Python class that needs the backend.
c10::intrusive_ptr<ProcessGroupMuster> muster_backend(const c10::intrusive_ptr<c10d::Backend>& backend,
                                                      const char* user);

/// The group of `backend`. The pointer keeps the backend alive.
inline std::shared_ptr<Group> group_of(const c10::intrusive_ptr<ProcessGroupMuster>& backend) {
  return {&backend->group(), [backend](Group*) {}};
}

/// A communication hook of muster.hooks with its options. The hook itself is created when the group is known.
struct NativeHook {
  /// All ranks must call this, because some hooks form a group. Call it without the GIL.
  Hook create(const c10::intrusive_ptr<ProcessGroupMuster>& backend) const {
    const bool secondary = two_phases && backend->group().membership().size > 1;
    return make({group_of(backend), secondary ? group_of(backend->duplicate()) : nullptr});
  }

  std::string name;  ///< includes the options
  bool two_phases;
  std::function<Hook(HookGroups)> make;
};

}  // namespace muster::python
