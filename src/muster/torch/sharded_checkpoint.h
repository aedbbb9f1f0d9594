#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "muster/group/group.h"

namespace muster::checkpoint {

/// The contents of a sharded checkpoint, by name: tensors and numbers that save_sharded() reads and load_sharded()
/// writes in place. They must outlive the state. Throws c10::ValueError for a name that is empty or taken, and for a
/// shard that does not lie within its tensor.
///
///   muster::checkpoint::ShardedState state;
///   state.add("model", *model).add("step", step);
///   state.add_shard("table", rows, {vocabulary, width}, {first_row, 0});
///   muster::checkpoint::save_sharded(*group, "run/step_100", state);
///
/// In Python, torch.distributed.checkpoint reads and writes the same: {"model": model.state_dict(), "step": 0} and a
/// DTensor "table".
class ShardedState {
 public:
  /// A tensor that all ranks have. One of them writes it; which one depends on the order of the calls.
  ShardedState& add(std::string name, at::Tensor tensor);
  /// The parameters and buffers of a module that all ranks have, as "name.0.weight" and so on.
  ShardedState& add(const std::string& name, const torch::nn::Module& module);
  ShardedState& add(std::string name, int64_t& number);
  /// This rank's box of a tensor of shape `sizes`; it begins at `offsets`. It may be empty. To be saved, the boxes of
  /// all ranks must cover the tensor and not overlap. To be loaded, they may have any place.
  ShardedState& add_shard(std::string name, at::Tensor shard, std::vector<int64_t> sizes, std::vector<int64_t> offsets);

 private:
  struct Part {
    std::string name;
    at::Tensor tensor;           ///< undefined for a number
    int64_t* number = nullptr;   ///< null for a tensor
    std::vector<int64_t> sizes;  ///< of the whole tensor
    std::vector<int64_t> offsets;
    bool shared = false;  ///< all ranks have it
  };
  friend class ShardWriter;
  friend class ShardReader;
  ShardedState& add_part(Part part);

  std::vector<Part> parts_;
};

/// Collective. Writes a checkpoint in the format of torch.distributed.checkpoint into the directory, which every rank
/// must see. Each rank writes one file, and rank 0 then replaces `.metadata`, so the directory holds the old checkpoint
/// or the new one at any moment. If a rank fails, all ranks throw ErrorException with its message.
void save_sharded(Group& group, const std::string& directory, const ShardedState& state);

/// Collective. Reads a checkpoint that save_sharded() or Python wrote, at any number of ranks and with other shards.
/// Each rank reads only what its tensors need. Shapes of whole tensors and dtypes must be those that were saved. If a
/// rank fails, all ranks throw ErrorException with its message, and tensors may be partly loaded. The files are not
/// trusted: nothing is unpickled by Python, and a malformed file is an error.
void load_sharded(Group& group, const std::string& directory, ShardedState& state);

}  // namespace muster::checkpoint
