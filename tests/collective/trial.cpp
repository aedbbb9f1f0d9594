#include "collective/trial.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "muster/base/random.h"

namespace muster::test {
namespace {

template <class T>
T element(const Bytes& bytes, size_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}

void randomize(Bytes& bytes, Dtype dtype, Random& random) {
  if (dtype != Dtype::kFloat32) {
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.next());
    return;
  }
  for (size_t at = 0; at < bytes.size(); at += sizeof(float)) {
    const float value = static_cast<float>(random.uniform() * 2 - 1);
    std::memcpy(bytes.data() + at, &value, sizeof(float));
  }
}

}  // namespace

Trial::Trial(const Algorithm& algorithm, const Setting& setting) : algorithm_(algorithm), setting_(setting) {
  for (Rank rank = 0; rank < setting.size; ++rank) {
    schedules_.push_back(algorithm.plan({.rank = rank,
                                         .size = setting.size,
                                         .count = setting.count,
                                         .element_bytes = size_of(setting.dtype),
                                         .root = setting.root,
                                         .chunk_bytes = setting.chunk_bytes}));
  }
  fill();
}

void Trial::fill() {
  Random random(setting_.seed);
  for (Rank rank = 0; rank < setting_.size; ++rank) {
    Bytes original(algorithm_.shape == Shape::kBarrier ? 0 : input_bytes());
    randomize(original, setting_.dtype, random);
    originals_.push_back(original);
    outputs_.emplace_back(output_bytes(), 0xee);
    scratch_.emplace_back(schedules_[rank].scratch_bytes, 0xdd);
    if (setting_.in_place && !original.empty()) std::memcpy(input(rank), original.data(), original.size());
    inputs_.push_back(std::move(original));
  }
}

uint8_t* Trial::input(Rank rank) {
  if (!setting_.in_place) return inputs_[rank].data();
  return outputs_[rank].data() + (algorithm_.shape == Shape::kAllGather ? rank * input_bytes() : 0);
}

Buffers Trial::buffers(Rank rank) {
  const size_t element = size_of(setting_.dtype);
  return {.input = {input(rank), originals_[rank].size() / element, setting_.dtype},
          .output = {outputs_[rank].data(), outputs_[rank].size() / element, setting_.dtype},
          .op = ReduceOp::kSum};
}

size_t Trial::output_bytes() const {
  if (algorithm_.shape == Shape::kBarrier) return 0;
  return input_bytes() * (algorithm_.shape == Shape::kAllGather ? setting_.size : 1);
}

std::string Trial::fault() const {
  switch (algorithm_.shape) {
    case Shape::kAllReduce:
      return reduced_fault();
    case Shape::kBroadcast:
    case Shape::kAllGather:
      return moved_fault();
    case Shape::kBarrier:
      return {};
  }
  return {};
}

std::string Trial::reduced_fault() const {
  for (Rank rank = 1; rank < setting_.size; ++rank) {
    if (outputs_[rank] != outputs_[0]) return fmt::format("{}: rank {} differs from rank 0", name(), rank);
  }
  for (size_t i = 0; i < setting_.count; ++i) {
    if (setting_.dtype == Dtype::kFloat32) {
      double sum = 0;
      for (const Bytes& original : originals_) sum += element<float>(original, i);
      if (std::abs(element<float>(outputs_[0], i) - sum) > 1e-5 * setting_.size) {
        return fmt::format("{}: element {} is {}, not {}", name(), i, element<float>(outputs_[0], i), sum);
      }
    } else {
      uint64_t sum = 0;
      for (const Bytes& original : originals_) sum += element<uint64_t>(original, i);
      if (element<uint64_t>(outputs_[0], i) != sum) return fmt::format("{}: element {} is wrong", name(), i);
    }
  }
  return {};
}

std::string Trial::moved_fault() const {
  Bytes wanted;
  if (algorithm_.shape == Shape::kBroadcast) {
    wanted = originals_[setting_.root];
  } else {
    for (const Bytes& original : originals_) wanted.insert(wanted.end(), original.begin(), original.end());
  }
  for (Rank rank = 0; rank < setting_.size; ++rank) {
    if (outputs_[rank] != wanted) return fmt::format("{}: rank {} has wrong bytes", name(), rank);
  }
  return {};
}

std::string Trial::name() const {
  return fmt::format("{} of {} ranks, count {}, root {}, chunks of {}, {}place, seed {}", algorithm_.name,
                     setting_.size, setting_.count, setting_.root, setting_.chunk_bytes,
                     setting_.in_place ? "in " : "out of ", setting_.seed);
}

std::vector<size_t> telling_counts(int size) {
  const size_t n = size;
  return {0, 1, 2, n - 1, n, n + 1, 1000, 12345};
}

}  // namespace muster::test
