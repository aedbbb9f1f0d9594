#include "muster/torch/reducer/reducer_verify.h"

#include <algorithm>
#include <array>
#include <cstring>

#include <c10/util/StringUtil.h>

#include "muster/torch/exception.h"

namespace muster {
namespace {

/// FNV-1a over words.
class Fingerprint {
 public:
  void add(int64_t word) {
    for (int shift = 0; shift < 64; shift += 8) {
      hash_ = (hash_ ^ ((static_cast<uint64_t>(word) >> shift) & 0xff)) * 0x100000001b3;
    }
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

/// A model's tensors in one row.
struct Row {
  Row(const NamedTensors& parameters, const NamedTensors& buffers)
      : tensors(parameters), buffers_at(parameters.size()) {
    tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  }
  bool is_buffer(size_t index) const { return index >= buffers_at; }

  NamedTensors tensors;
  size_t buffers_at;
};

uint64_t fingerprint_of(const Row& row, size_t index) {
  const auto& [name, tensor] = row.tensors[index];
  Fingerprint print;
  print.add(row.is_buffer(index) ? 1 : 0);
  for (const char letter : name) print.add(letter);
  print.add(static_cast<int64_t>(tensor.scalar_type()));
  print.add(static_cast<int64_t>(tensor.device().type()));
  print.add(static_cast<int64_t>(tensor.layout()));
  print.add(tensor.requires_grad() ? 1 : 0);
  print.add(tensor.dim());
  for (const int64_t size : tensor.sizes()) print.add(size);
  if (tensor.layout() != c10::kStrided) return print.value();
  for (const int64_t stride : tensor.strides()) print.add(stride);
  return print.value();
}

/// What all ranks have, one behind the other.
template <class T>
std::vector<T> exchange(Group& group, std::vector<T> mine, Dtype dtype) {
  std::vector<T> all(mine.size() * static_cast<size_t>(group.membership().size));
  value_or_throw(group.all_gather({mine.data(), mine.size(), dtype}, {all.data(), all.size(), dtype}).wait());
  return all;
}

constexpr size_t kTextBytes = 256;

std::string describe(const Row& row, size_t index) {
  if (index >= row.tensors.size()) return "none";
  const auto& [name, tensor] = row.tensors[index];
  std::string text = name.empty() ? "" : name + ": ";
  text += c10::str(tensor.scalar_type(), tensor.sizes());
  if (!row.is_buffer(index) && !tensor.requires_grad()) text += " without gradient";
  if (tensor.layout() != c10::kStrided) {
    text += c10::str(", ", tensor.layout());
  } else if (!tensor.is_contiguous()) {
    text += c10::str(" with strides ", tensor.strides());
  }
  return text.substr(0, kTextBytes - 1);
}

/// Which tensor differs first, and where: the first rank whose tensor is not rank 0's.
struct Difference {
  size_t index = 0;
  Rank rank = kNoRank;
};

/// How many a rank has, and a fingerprint of them all.
struct Summary {
  uint64_t parameters = 0, buffers = 0, whole = 0;
  uint64_t count() const { return parameters + buffers; }
  bool operator==(const Summary&) const = default;
};

Difference find_difference(Group& group, const std::vector<uint64_t>& prints, const std::vector<Summary>& ranks) {
  uint64_t most = 0;
  for (const Summary& rank : ranks) most = std::max(most, rank.count());
  std::vector<uint64_t> mine = prints;
  mine.resize(most);
  const std::vector<uint64_t> all = exchange(group, mine, Dtype::kUint64);
  for (size_t index = 0; index < most; ++index) {
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      const bool here = index < ranks[rank].count(), at_root = index < ranks.front().count();
      if (here != at_root || all[rank * most + index] != all[index]) return {index, static_cast<Rank>(rank)};
    }
  }
  return {};  // fingerprints of the whole differ only if those of a tensor do
}

/// "parameter 1 differs: rank 2 has ..., rank 0 has ... (3 and 4 parameters)"
std::string compare(const Difference& difference, const std::vector<Summary>& ranks,
                    const std::vector<std::string>& texts) {
  const auto rank = static_cast<size_t>(difference.rank);
  const Summary &there = ranks[rank], &root = ranks.front();
  const uint64_t parameters = std::max(there.parameters, root.parameters);
  const bool buffer = difference.index >= parameters;
  return c10::str(buffer ? "buffer " : "parameter ", buffer ? difference.index - parameters : difference.index,
                  " differs: rank ", rank, " has ", texts[rank], ", rank 0 has ", texts[0], " (",
                  buffer ? there.buffers : there.parameters, " and ", buffer ? root.buffers : root.parameters,
                  buffer ? " buffers)" : " parameters)");
}

}  // namespace

void verify_model(Group& group, const NamedTensors& parameters, const NamedTensors& buffers) {
  const Row row(parameters, buffers);
  std::vector<uint64_t> prints;
  Fingerprint whole;
  for (size_t index = 0; index < row.tensors.size(); ++index) {
    prints.push_back(fingerprint_of(row, index));
    whole.add(static_cast<int64_t>(prints.back()));
  }
  const auto all = exchange<uint64_t>(group, {parameters.size(), buffers.size(), whole.value()}, Dtype::kUint64);
  std::vector<Summary> ranks;
  for (size_t i = 0; i < all.size(); i += 3) ranks.push_back({all[i], all[i + 1], all[i + 2]});
  if (std::all_of(ranks.begin(), ranks.end(), [&](const Summary& rank) { return rank == ranks.front(); })) return;

  const Difference difference = find_difference(group, prints, ranks);
  const std::string mine = describe(row, difference.index);
  std::vector<uint8_t> text(kTextBytes);
  std::copy(mine.begin(), mine.end(), text.begin());
  const std::vector<uint8_t> letters = exchange(group, text, Dtype::kUint8);
  std::vector<std::string> texts;
  for (size_t i = 0; i < letters.size(); i += kTextBytes)
    texts.emplace_back(reinterpret_cast<const char*>(&letters[i]));
  throw_error({ErrorCode::kMismatch,
               "DDP expects same model across all ranks, but " + compare(difference, ranks, texts) +
                   ": build the same model at every rank",
               difference.rank});
}

}  // namespace muster
