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

/// The contents of a checkpoint, by name: references that save() reads and load() writes.
///
///   muster::checkpoint::State state;
///   state.add("model", *model).add("optimizer", optimizer).add("epoch", epoch);
///   const std::string path = "run/checkpoint.pt";
///   if (muster::checkpoint::exists(*group, path)) muster::checkpoint::load(*group, path, state);
///   ...
///   muster::checkpoint::save(*group, path, state);
///
/// For a DistributedDataParallel, add the wrapped module, *ddp.module(), so that the file can be loaded without it. The
/// added objects must outlive the State. Throws c10::ValueError for a name that is empty or taken.
class State {
 public:
  State& add(std::string name, torch::nn::Module& module);
  /// Also takes a muster::optim::ZeroRedundancyOptimizer. Its state is gathered, so the file can be loaded into the
  /// plain optimizer and on another number of ranks.
  State& add(std::string name, torch::optim::Optimizer& optimizer);
  State& add(std::string name, at::Tensor tensor);  ///< loaded in place
  State& add(std::string name, int64_t& number);
  State& add(std::string name, double& number);
  State& add(std::string name, std::string& text);
  /// Takes any object with save(OutputArchive&) and load(InputArchive&), such as the sampler of a torch::data
  /// DataLoader.
  template <class T>
  State& add_archived(std::string name, T& object) {
    return add_entry({std::move(name), [&object](auto& archive) { object.save(archive); },
                      [&object](auto& archive) { object.load(archive); }});
  }

 private:
  struct Entry {
    std::string name;
    std::function<void(torch::serialize::OutputArchive&)> save;
    std::function<void(torch::serialize::InputArchive&)> load;
    std::function<void(Group&)> gather = nullptr;  ///< called at all ranks before save; null if rank 0 has all state
  };
  State& add_entry(Entry entry);
  template <class Value>
  State& add_value(std::string name, Value& value);
  void check_alike(Group& group) const;

  std::vector<Entry> entries_;

  friend void save(Group& group, const std::string& path, const State& state);
  friend void load(Group& group, const std::string& path, State& state);
};

/// Collective. Rank 0 writes the file in libtorch's archive format, and all ranks return when it is on the disk. The
/// file is written to path + ".partial", flushed and renamed. So `path` is always a complete checkpoint, the old or the
/// new one. If a rank fails, all ranks throw ErrorException with its message.
void save(Group& group, const std::string& path, const State& state);

/// Collective. Returns true if rank 0 sees the file. If rank 0 cannot tell, all ranks throw ErrorException.
bool exists(Group& group, const std::string& path);

/// Collective. Rank 0 reads the file and sends it to all ranks. If any rank cannot load it (a name or tensor is
/// missing, a shape differs), all ranks throw ErrorException, which names the rank and the reason. The state may then
/// be partly loaded.
void load(Group& group, const std::string& path, State& state);

}  // namespace muster::checkpoint
