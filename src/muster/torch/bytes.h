#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include "muster/group/group.h"

// Archives, and what else has no length that all ranks know, as tensors uint8[N] that travel.
namespace muster {

at::Tensor to_bytes(torch::serialize::OutputArchive& archive);
torch::serialize::InputArchive from_bytes(const at::Tensor& bytes);

/// At rank `to` everybody's bytes, by rank; nothing at the others. Collective.
std::vector<at::Tensor> gather_bytes(Group& group, const at::Tensor& bytes, Rank to);
/// Root's bytes at every rank; the others' argument does not matter. Collective.
at::Tensor broadcast_bytes(Group& group, const at::Tensor& bytes, Rank root);

/// Runs `body`; what it throws, as text.
std::string error_message_of(const std::function<void()>& body);

/// Collective: if any rank says what went wrong with it (empty: nothing), all throw the same ErrorException, with what
/// the first of them said and its rank. So no rank goes on alone, to wait for those that do not.
void agree(Group& group, const std::string& problem);

}  // namespace muster
