#include "muster/torch/checkpoint.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <exception>
#include <filesystem>
#include <system_error>

#include "muster/torch/archive_exchange.h"
#include "muster/torch/c10d/arguments.h"
#include "muster/torch/checkpoint_file.h"
#include "muster/torch/collectives.h"
#include "muster/torch/exception.h"
#include "muster/torch/optim/zero_redundancy_optimizer.h"

namespace muster::checkpoint {
namespace {

/// Copies the values of `stored`, which must have the same shape.
void load_tensor(const at::Tensor& tensor, const at::Tensor& stored, const std::string& name = "") {
  if (tensor.sizes() != stored.sizes()) {
    throw std::runtime_error(c10::str(name.empty() ? "it" : "its '" + name + "'", " is of shape ", stored.sizes(),
                                      ", here of ", tensor.sizes()));
  }
  const at::NoGradGuard no_grad;
  tensor.copy_(stored);
}

/// Loads the tensors in place. Module::load() would replace them by the tensors of the file, of any shape. A reducer,
/// whose hooks are on the old tensors, would then wait for their gradients forever.
void load_module(torch::nn::Module& module, torch::serialize::InputArchive& archive, const std::string& prefix = "") {
  const auto load = [&](const auto& tensors, bool buffers) {
    for (const auto& item : tensors) {
      at::Tensor stored;
      archive.read(item.key(), stored, buffers);
      load_tensor(item.value(), stored, prefix + item.key());
    }
  };
  load(module.named_parameters(/*recurse=*/false), false);
  load(module.named_buffers(/*recurse=*/false), true);
  for (const auto& child : module.named_children()) {
    if (!child.value()->is_serializable()) continue;
    torch::serialize::InputArchive nested;
    archive.read(child.key(), nested);
    load_module(*child.value(), nested, prefix + child.key() + ".");
  }
}

c10::IValue value_in(torch::serialize::InputArchive& archive) {
  c10::IValue value;
  archive.read("value", value);
  return value;
}

}  // namespace

State& State::add_entry(Entry entry) {
  check_argument(!entry.name.empty(), "checkpoint::State::add", "the name is empty");
  for (const Entry& other : entries_) {
    check_argument(other.name != entry.name, "checkpoint::State::add", "the name '", entry.name, "' is taken");
  }
  entries_.push_back(std::move(entry));
  return *this;
}

State& State::add(std::string name, torch::nn::Module& module) {
  return add_entry({std::move(name), [&module](auto& archive) { module.save(archive); },
                    [&module](auto& archive) { load_module(module, archive); }});
}

State& State::add(std::string name, torch::optim::Optimizer& optimizer) {
  const auto load = [&optimizer](auto& archive) { optimizer.load(archive); };
  auto* sharded = dynamic_cast<optim::ShardedOptimizer*>(&optimizer);
  if (sharded == nullptr) {
    return add_entry({std::move(name), [&optimizer](auto& archive) { optimizer.save(archive); }, load});
  }
  // Shared by `gather`, which sets it, and `save`, which uses it.
  const auto whole = std::make_shared<std::unique_ptr<torch::optim::Optimizer>>();
  return add_entry({std::move(name), [whole](auto& archive) { std::exchange(*whole, nullptr)->save(archive); }, load,
                    [sharded, whole](Group&) { *whole = sharded->consolidate(0); }});
}

State& State::add(std::string name, at::Tensor tensor) {
  return add_entry({std::move(name), [tensor](auto& archive) { archive.write("value", tensor); },
                    [tensor](auto& archive) { load_tensor(tensor, value_in(archive).toTensor()); }});
}

template <class Value>
State& State::add_value(std::string name, Value& value) {
  return add_entry({std::move(name), [&value](auto& archive) { archive.write("value", c10::IValue(value)); },
                    [&value](auto& archive) { value = value_in(archive).template to<Value>(); }});
}

State& State::add(std::string name, int64_t& number) { return add_value(std::move(name), number); }
State& State::add(std::string name, double& number) { return add_value(std::move(name), number); }
State& State::add(std::string name, std::string& text) { return add_value(std::move(name), text); }

/// Collective: throws at all ranks unless all gather the same entries.
void State::check_alike(Group& group) const {
  std::string own;
  for (const Entry& entry : entries_) {
    if (entry.gather) own += c10::str(own.empty() ? "" : ", ", "'", entry.name, "'");
  }
  const std::string expected = broadcast_text(group, own, 0);
  const auto list = [](const std::string& names) { return names.empty() ? "none" : names; };
  throw_if_any_failed(
      group,
      own == expected ? "" : "has other sharded optimizers in its state: " + list(own) + ", rank 0 " + list(expected));
}

void save(Group& group, const std::string& path, const State& state) {
  state.check_alike(group);
  std::string problem;
  for (const auto& entry : state.entries_) {
    if (!entry.gather) continue;
    // A rank that fails alone must still make the collective calls of the others.
    std::exception_ptr at_all_ranks;
    const std::string here = error_message_of([&] {
      try {
        entry.gather(group);
      } catch (const ErrorException&) {
        at_all_ranks = std::current_exception();
      }
    });
    if (at_all_ranks) std::rethrow_exception(at_all_ranks);
    if (problem.empty() && !here.empty()) problem = "'" + entry.name + "': " + here;
  }
  if (group.membership().rank == 0 && problem.empty()) {
    problem = error_message_of([&] {
      torch::serialize::OutputArchive archive;
      for (const auto& entry : state.entries_) {
        torch::serialize::OutputArchive nested(archive.compilation_unit());
        entry.save(nested);
        archive.write(entry.name, nested);
      }
      write_atomically(path, [&](const ByteSink& sink) { archive.save_to(sink); });
    });
  }
  throw_if_any_failed(group, problem.empty() ? problem : "could not save the checkpoint: " + problem);
}

bool exists(Group& group, const std::string& path) {
  at::Tensor found = at::scalar_tensor(false, at::kBool);
  std::error_code failure;
  if (group.membership().rank == 0) found.fill_(std::filesystem::exists(path, failure));
  throw_if_any_failed(group, failure ? "could not look for the checkpoint " + path + ": " + failure.message() : "");
  broadcast(group, found, 0);
  return found.item<bool>();
}

void load(Group& group, const std::string& path, State& state) {
  at::Tensor bytes;
  std::string problem;
  if (group.membership().rank == 0) problem = error_message_of([&] { bytes = read_file(path); });
  throw_if_any_failed(group, problem.empty() ? problem : "could not load the checkpoint: " + problem);
  bytes = broadcast_bytes(group, bytes, 0);
  std::string during = "the file";
  problem = error_message_of([&] {
    torch::serialize::InputArchive archive = from_bytes(bytes);
    for (const auto& entry : state.entries_) {
      during = "'" + entry.name + "'";
      torch::serialize::InputArchive nested;
      if (!archive.try_read(entry.name, nested)) {
        throw std::runtime_error("the checkpoint has none, but " + c10::Join(", ", archive.keys()));
      }
      entry.load(nested);
    }
  });
  throw_if_any_failed(
      group, problem.empty() ? problem : "could not load " + during + " of the checkpoint " + path + ": " + problem);
}

}  // namespace muster::checkpoint
