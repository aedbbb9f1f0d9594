#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include "muster/group/group.h"

namespace muster::checkpoint {

/// What a checkpoint holds, by name: references to it, which save() reads and load() writes.
///
///   muster::checkpoint::State state;
///   state.add("model", *model).add("optimizer", optimizer).add("epoch", epoch);
///   const std::string path = "run/checkpoint.pt";
///   if (muster::checkpoint::exists(*group, path)) muster::checkpoint::load(*group, path, state);
///   ...
///   muster::checkpoint::save(*group, path, state);
///
/// Of a DistributedDataParallel add what it wraps, *ddp.module(), so that the file can be loaded without it. What is
/// added must outlive this. Throws c10::ValueError for a name that is empty or taken.
class State {
 public:
  State& add(std::string name, torch::nn::Module& module);
  /// Also a muster::optim::ZeroRedundancyOptimizer, whose state is gathered to be saved: such a file can be loaded into
  /// the plain optimizer, and on another number of ranks.
  State& add(std::string name, torch::optim::Optimizer& optimizer);
  State& add(std::string name, at::Tensor tensor);  ///< loaded in place
  State& add(std::string name, int64_t& number);
  State& add(std::string name, double& number);
  State& add(std::string name, std::string& text);
  /// Anything with save(OutputArchive&) and load(InputArchive&), such as a sampler of torch::data or a DataLoader's.
  template <class T>
  State& add_archived(std::string name, T& object) {
    return add_entry({std::move(name), nullptr, [&object](auto& archive) { object.save(archive); },
                      [&object](auto& archive) { object.load(archive); }});
  }

 private:
  struct Entry {
    std::string name;
    std::function<void(Group&)> gather;  ///< called at all ranks before save; null where rank 0 has everything
    std::function<void(torch::serialize::OutputArchive&)> save;
    std::function<void(torch::serialize::InputArchive&)> load;
  };
  State& add_entry(Entry entry);
  void check_alike(Group& group) const;

  std::vector<Entry> entries_;

  friend void save(Group& group, const std::string& path, const State& state);
  friend void load(Group& group, const std::string& path, State& state);
};

/// Collective. Rank 0 writes the file, in libtorch's archive format, and all return when it is on the disk: it is
/// written beside `path` (path + ".partial"), flushed and renamed, so at any moment `path` is the old checkpoint or the
/// new one, whole. Where a rank fails, all throw ErrorException, with what the system or the optimizer said there.
void save(Group& group, const std::string& path, const State& state);

/// Collective: whether there is such a file where rank 0 runs. If that cannot be told there, all throw ErrorException.
bool exists(Group& group, const std::string& path);

/// Collective. Rank 0 reads the file and sends it to all, so the others need not see it. If any rank cannot take it (a
/// name or a tensor is missing, a shape is another), all throw ErrorException, which names the rank and the reason;
/// the state may then be partly loaded.
void load(Group& group, const std::string& path, State& state);

}  // namespace muster::checkpoint
