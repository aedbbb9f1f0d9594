#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include "muster/group/group.h"

// Sends archives and texts, whose length only the sender knows, as tensors uint8[N]. All functions that take a group
// are collective.
namespace muster {

at::Tensor to_bytes(torch::serialize::OutputArchive& archive);
torch::serialize::InputArchive from_bytes(const at::Tensor& bytes);

/// Returns the bytes of all ranks, by rank, at rank `dst`; an empty list at the other ranks.
std::vector<at::Tensor> gather_bytes(Group& group, const at::Tensor& bytes, Rank dst);
/// Returns the root's bytes. The argument of the other ranks is ignored.
at::Tensor broadcast_bytes(Group& group, const at::Tensor& bytes, Rank root);
std::string broadcast_text(Group& group, const std::string& text, Rank root);

/// Runs `body`. Returns the message of the exception that it throws, or an empty string.
std::string error_message_of(const std::function<void()>& body);

struct Failure {
  Rank rank;
  std::string text;
};
/// The first rank whose `problem` is not empty, the same at all ranks.
std::optional<Failure> first_failure(Group& group, const std::string& problem);
/// If any rank has a problem, all ranks throw the same ErrorException with the first problem. So no rank continues
/// alone and waits for the others. Each rank runs `undo` before it throws this exception; an error of the group itself
/// is thrown without it, because then the other ranks may have succeeded.
void throw_if_any_failed(Group& group, const std::string& problem, const std::function<void()>& undo = {});

}  // namespace muster
