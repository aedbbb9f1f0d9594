#include "muster/torch/reducer_verify.h"

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

uint64_t fingerprint_of(const at::Tensor& parameter) {
  Fingerprint print;
  print.add(static_cast<int64_t>(parameter.scalar_type()));
  print.add(static_cast<int64_t>(parameter.device().type()));
  print.add(parameter.requires_grad() ? 1 : 0);
  print.add(parameter.dim());
  for (const int64_t size : parameter.sizes()) print.add(size);
  for (const int64_t stride : parameter.strides()) print.add(stride);
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

std::string describe_parameter(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
                               size_t index) {
  if (index >= parameters.size()) return "none";
  const at::Tensor& parameter = parameters[index];
  std::string text = index < names.size() && !names[index].empty() ? names[index] + ": " : "";
  text += c10::str(parameter.scalar_type(), parameter.sizes(), parameter.requires_grad() ? "" : " without gradient");
  if (!parameter.is_contiguous()) text += c10::str(" with strides ", parameter.strides());
  return text.substr(0, kTextBytes - 1);
}

/// Which parameter differs first, and where: the first rank whose parameter is not rank 0's.
struct Difference {
  size_t index = 0;
  Rank rank = kNoRank;
};

Difference find_difference(Group& group, const std::vector<uint64_t>& prints, const std::vector<uint64_t>& counts) {
  const uint64_t most = *std::max_element(counts.begin(), counts.end());
  std::vector<uint64_t> mine = prints;
  mine.resize(most);
  const std::vector<uint64_t> all = exchange(group, mine, Dtype::kUint64);
  for (size_t index = 0; index < most; ++index) {
    for (size_t rank = 1; rank < counts.size(); ++rank) {
      const bool here = index < counts[rank], at_root = index < counts.front();
      if (here != at_root || all[rank * most + index] != all[index]) return {index, static_cast<Rank>(rank)};
    }
  }
  return {};  // fingerprints of the whole differ only if those of a parameter do
}

}  // namespace

void verify_parameters(Group& group, const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names) {
  std::vector<uint64_t> prints;
  Fingerprint whole;
  for (const at::Tensor& parameter : parameters) {
    prints.push_back(fingerprint_of(parameter));
    whole.add(static_cast<int64_t>(prints.back()));
  }
  const std::vector<uint64_t> all = exchange<uint64_t>(group, {parameters.size(), whole.value()}, Dtype::kUint64);
  std::vector<uint64_t> counts;
  bool equal = true;
  for (size_t i = 0; i < all.size(); i += 2) {
    counts.push_back(all[i]);
    equal = equal && all[i] == all[0] && all[i + 1] == all[1];
  }
  if (equal) return;

  const Difference difference = find_difference(group, prints, counts);
  const std::string mine = describe_parameter(parameters, names, difference.index);
  std::vector<uint8_t> text(kTextBytes);
  std::copy(mine.begin(), mine.end(), text.begin());
  const std::vector<uint8_t> texts = exchange(group, text, Dtype::kUint8);
  const auto text_of = [&](Rank rank) {
    return std::string(reinterpret_cast<const char*>(&texts[static_cast<size_t>(rank) * kTextBytes]));
  };
  const auto rank = static_cast<size_t>(difference.rank);
  throw_error({ErrorCode::kMismatch,
               c10::str("DDP expects same model across all ranks, but parameter ", difference.index, " differs: rank ",
                        rank, " has ", text_of(difference.rank), ", rank 0 has ", text_of(0), " (", counts[rank],
                        " and ", counts.front(), " parameters): build the same model at every rank"),
               difference.rank});
}

}  // namespace muster
