#include "muster/torch/archive_exchange.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "muster/torch/collectives.h"
#include "muster/torch/tensor.h"

namespace muster {
namespace {

at::Tensor bytes_of(const std::string& text) {
  const at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  if (!text.empty()) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

std::vector<int64_t> all_gather_number(Group& group, int64_t number) {
  const at::Tensor all = all_gather(group, at::scalar_tensor(number, at::kLong)).contiguous();
  return {all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + all.numel()};
}

}  // namespace

at::Tensor to_bytes(torch::serialize::OutputArchive& archive) {
  std::string text;
  archive.save_to([&text](const void* data, size_t size) {
    text.append(static_cast<const char*>(data), size);
    return size;
  });
  return bytes_of(text);
}

torch::serialize::InputArchive from_bytes(const at::Tensor& bytes) {
  torch::serialize::InputArchive archive;
  archive.load_from(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
  return archive;
}

std::vector<at::Tensor> gather_bytes(Group& group, const at::Tensor& bytes, Rank dst) {
  const auto [self, size] = std::pair{group.membership().rank, static_cast<size_t>(group.membership().size)};
  const std::vector<int64_t> lengths = all_gather_number(group, bytes.numel());
  std::vector<size_t> sent(size), received(size);
  sent[static_cast<size_t>(dst)] = bytes.nbytes();
  if (self == dst) received.assign(lengths.begin(), lengths.end());
  int64_t total = 0;
  for (const size_t length : received) total += static_cast<int64_t>(length);
  const at::Tensor all = at::empty({total}, at::kByte);
  value_or_throw(
      group.all_to_all(value_or_throw(view_of(bytes)), value_or_throw(view_of(all)), {}, sent, received).wait());
  return self == dst ? all.split_with_sizes(lengths) : std::vector<at::Tensor>();
}

at::Tensor broadcast_bytes(Group& group, const at::Tensor& bytes, Rank root) {
  const bool here = group.membership().rank == root;
  const at::Tensor length = at::scalar_tensor(here ? bytes.numel() : 0, at::kLong);
  broadcast(group, length, root);
  at::Tensor result = here ? bytes : at::empty({length.item<int64_t>()}, at::kByte);
  if (result.numel() > 0) broadcast(group, result, root);
  return result;
}

std::string broadcast_text(Group& group, const std::string& text, Rank root) {
  const at::Tensor bytes = broadcast_bytes(group, bytes_of(text), root);
  return {static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()};
}

std::string error_message_of(const std::function<void()>& body) {
  try {
    body();
    return "";
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
}

std::optional<Failure> first_failure(Group& group, const std::string& problem) {
  const std::vector<int64_t> lengths = all_gather_number(group, static_cast<int64_t>(problem.size()));
  const auto first = std::find_if(lengths.begin(), lengths.end(), [](int64_t length) { return length > 0; });
  if (first == lengths.end()) return std::nullopt;
  const auto rank = static_cast<Rank>(first - lengths.begin());
  return Failure{rank, broadcast_text(group, problem, rank)};
}

void throw_if_any_failed(Group& group, const std::string& problem, const std::function<void()>& undo) {
  if (const auto failure = first_failure(group, problem)) {
    if (undo) undo();
    throw ErrorException({ErrorCode::kIo, c10::str("rank ", failure->rank, " ", failure->text), failure->rank});
  }
}

}  // namespace muster
