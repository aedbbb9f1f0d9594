#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "muster/group/group.h"

namespace torch::inductor {
class AOTIModelPackageLoader;
}

namespace muster::graph {

/// A model that muster.graph.package() has compiled ahead of time. It runs without Python, and its collectives run over
/// groups of this process.
///
/// The constructor throws c10::ValueError for a wrong file or group, muster::ErrorException if the group fails. run()
/// throws what compiled code throws, a std::runtime_error; the group has the reason (Group::status()).
class Runner {
 public:
  /// By the names that package() has for them. A process makes its runners one after the other, and all processes in
  /// the same order: a runner forms a group of its own.
  using Groups = std::map<std::string, std::shared_ptr<Group>>;

  Runner(const std::string& package, const Groups& groups);
  ~Runner();

  /// The outputs of the model, in the order of a flat list. One call at a time. All ranks of the groups must make it.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs);

 private:
  class NamedGroup;

  std::vector<std::shared_ptr<NamedGroup>> groups_;  // outlives the model, which finds them by their names
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> model_;
};

}  // namespace muster::graph
