#include "muster/torch/graph/runner.h"

#include <dlfcn.h>
#include <link.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <filesystem>
#include <mutex>
#include <numeric>
#include <sstream>
#include <utility>

#include "muster/torch/backend.h"
#include "muster/torch/collectives.h"
#include "muster/torch/exception.h"
#include "muster/torch/graph/operators.h"

namespace muster::graph {
namespace {

/// A line of the package's list of groups: the name for the user, the name in the graph, rank and number of ranks.
struct Member {
  std::string name, name_in_graph;
  int rank = 0, size = 0;
};

std::vector<Member> members_of(const std::string& package,
                               const std::unordered_map<std::string, std::string>& metadata) {
  const auto found = metadata.find("muster_groups");
  TORCH_CHECK_VALUE(found != metadata.end(), package, " was not made by muster.graph.package()");
  std::vector<Member> members;
  std::istringstream lines(found->second);
  for (Member member; lines >> member.name >> member.name_in_graph >> member.rank >> member.size;) {
    members.push_back(member);
  }
  TORCH_CHECK_VALUE(lines.eof(), package, ": its list of groups is damaged");
  return members;
}

/// Compiled models ask for libtorch.so, by its name alone. A program may not have loaded it: it holds no code. Without
/// it, the model fails to load, and says so.
void load_libtorch() {
  void* const loaded = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_NOW);
  link_map* map = nullptr;
  if (loaded == nullptr || dlinfo(loaded, RTLD_DI_LINKMAP, &map) != 0) return;
  const auto path = std::filesystem::path(map->l_name).parent_path() / "libtorch.so";
  (void)dlopen(path.c_str(), RTLD_NOW);
  dlclose(loaded);
}

/// A backend of its own over the ranks of `group`, because the backend owns its group.
c10::intrusive_ptr<ProcessGroupMuster> backend_over(Group& group) {
  auto store = value_or_throw(Group::job_store());
  std::vector<Rank> ranks(static_cast<size_t>(group.membership().size));
  std::iota(ranks.begin(), ranks.end(), 0);
  const std::string name = c10::str("graph.", group.sequence());  // unique, and the same at all ranks
  barrier(group);
  auto own = value_or_throw(group.split(*store, ranks, name));
  const auto timeout = std::chrono::duration_cast<ProcessGroupMuster::Milliseconds>(group.timeout());
  return c10::make_intrusive<ProcessGroupMuster>(std::move(store), std::move(own), timeout,
                                                 ProcessGroupMuster::Callbacks{});
}

}  // namespace

/// A group that graphs find by a name. Runners whose graphs have the same name for the same group share it.
class Runner::NamedGroup {
 public:
  static std::shared_ptr<NamedGroup> of(const std::shared_ptr<Group>& group, const std::string& name) {
    static std::mutex mutex;
    static std::map<std::string, std::weak_ptr<NamedGroup>> all;
    const std::lock_guard lock(mutex);
    auto named = all[name].lock();
    if (named) {
      TORCH_CHECK_VALUE(named->group_ == group, "another model in this process has the name ", name,
                        " for another group: package one of them in a process where the group has another name");
      return named;
    }
    named = std::make_shared<NamedGroup>(group, name);
    all[name] = named;
    return named;
  }

  NamedGroup(std::shared_ptr<Group> group, std::string name)
      : group_(std::move(group)),
        name_(std::move(name)),
        process_group_(c10::make_intrusive<c10d::ProcessGroup>(group_->membership().rank, group_->membership().size)) {
    constexpr auto kCustom = c10d::ProcessGroup::BackendType::CUSTOM;
    process_group_->setBackend(c10::DeviceType::CPU, kCustom, backend_over(*group_));
    process_group_->setDefaultBackend(kCustom);
    process_group_->setGroupName(name_);
    c10d::register_process_group(name_, process_group_);
  }
  ~NamedGroup() { c10d::unregister_process_group(name_); }
  NamedGroup(const NamedGroup&) = delete;
  NamedGroup& operator=(const NamedGroup&) = delete;

 private:
  const std::shared_ptr<Group> group_;
  const std::string name_;
  const c10::intrusive_ptr<c10d::ProcessGroup> process_group_;  ///< the registry does not own it
};

Runner::Runner(const std::string& package, const Groups& groups) {
  TORCH_CHECK_VALUE(std::filesystem::exists(package), "there is no file ", package);
  define_operators();
  load_libtorch();
  model_ = std::make_unique<torch::inductor::AOTIModelPackageLoader>(package, "model", /*run_single_threaded=*/true);
  for (const Member& member : members_of(package, model_->get_metadata())) {
    const auto given = groups.find(member.name);
    TORCH_CHECK_VALUE(given != groups.end(), package, " needs a group with the name \"", member.name, "\"");
    const GroupSpec& self = given->second->membership();
    TORCH_CHECK_VALUE(self.rank == member.rank && self.size == member.size, package, " is compiled for rank ",
                      member.rank, " of ", member.size, " in group \"", member.name, "\", and this is rank ", self.rank,
                      " of ", self.size);
    groups_.push_back(NamedGroup::of(given->second, member.name_in_graph));
  }
}

Runner::~Runner() = default;

std::vector<at::Tensor> Runner::run(const std::vector<at::Tensor>& inputs) { return model_->run(inputs); }

}  // namespace muster::graph
