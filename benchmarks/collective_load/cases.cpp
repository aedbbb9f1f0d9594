#include "cases.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace muster::load {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kAligned = 16;  // elements: a cache line

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

/// Of rank `rank`'s input when a result is checked: sums are exact.
float pattern(size_t index, int rank) { return static_cast<float>(index % 13 + rank); }

float summed(size_t index, int ranks) { return static_cast<float>(index % 13 * ranks + ranks * (ranks - 1) / 2); }

[[noreturn]] void wrong(const std::string& operation, size_t index, float got, float expected) {
  std::fprintf(stderr, "%s: element %zu is %g, not %g\n", operation.c_str(), index, got, expected);
  std::exit(1);
}

}  // namespace

std::string Cases::answer(const Request& request) {
  if (request.verb == "prepare") {
    if (!prepare(request)) return "refused";
    check(request.operation);
    return std::to_string(elements_ * sizeof(float));
  }
  return std::to_string(request.verb == "copy" ? copy(request) : run(request));
}

float* Cases::allocate(size_t count, bool own) {
  if (own) return peer_.allocate(count);
  return ordinary_.emplace_back(new float[count]).get();
}

bool Cases::prepare(const Request& request) {
  slots_.clear();
  ordinary_.clear();
  peer_.release();
  copied_.reset();
  const size_t ranks = peer_.size();
  const size_t block = (request.bytes + sizeof(float) * ranks - 1) / (sizeof(float) * ranks);
  const bool blocks = request.operation != "all_reduce" && request.operation != "broadcast";
  elements_ = blocks ? block * ranks : (request.bytes + sizeof(float) - 1) / sizeof(float);
  const size_t stride = (elements_ + kAligned - 1) / kAligned * kAligned + kAligned;
  const bool own = request.memory == "own";
  float* const inputs = allocate(stride * request.slots, own);
  float* const outputs = blocks ? allocate(stride * request.slots, own) : inputs;
  if (inputs == nullptr || outputs == nullptr) return false;
  for (float* memory : {inputs, outputs}) std::memset(memory, 0, stride * request.slots * sizeof(float));
  for (size_t i = 0; i < request.slots; ++i) slots_.push_back({inputs + i * stride, outputs + i * stride});
  return true;
}

void Cases::call(const std::string& operation, const Slot& slot) {
  const size_t block = elements_ / peer_.size();
  if (operation == "all_reduce") return peer_.all_reduce(slot.output, elements_);
  if (operation == "broadcast") return peer_.broadcast(slot.output, elements_);
  if (operation == "all_gather") return peer_.all_gather(slot.input, slot.output, block);
  if (operation == "reduce_scatter") return peer_.reduce_scatter(slot.input, slot.output, block);
  if (operation == "all_to_all") return peer_.all_to_all(slot.input, slot.output, block);
  if (operation == "barrier") return peer_.barrier();
  std::fprintf(stderr, "there is no operation %s\n", operation.c_str());
  std::exit(2);
}

void Cases::check(const std::string& operation) {
  const Slot& slot = slots_.front();
  const int ranks = peer_.size();
  const size_t block = elements_ / ranks, mine = peer_.rank() * block;
  for (size_t i = 0; i < elements_; ++i) slot.input[i] = pattern(i, peer_.rank());
  call(operation, slot);
  const auto expect = [&](size_t count, auto&& expected) {
    for (size_t i = 0; i < count; ++i) {
      if (slot.output[i] != expected(i)) wrong(operation, i, slot.output[i], expected(i));
    }
  };
  if (operation == "all_reduce") expect(elements_, [&](size_t i) { return summed(i, ranks); });
  if (operation == "broadcast") expect(elements_, [&](size_t i) { return pattern(i, 0); });
  if (operation == "all_gather") expect(elements_, [&](size_t i) { return pattern(i % block, i / block); });
  if (operation == "reduce_scatter") expect(block, [&](size_t i) { return summed(mine + i, ranks); });
  if (operation == "all_to_all") expect(elements_, [&](size_t i) { return pattern(mine + i % block, i / block); });
  // Sums of zeros stay what they are, however often they are repeated.
  std::memset(slot.input, 0, elements_ * sizeof(float));
  std::memset(slot.output, 0, elements_ * sizeof(float));
}

double Cases::run(const Request& request) {
  peer_.barrier();
  const Clock::time_point begin = Clock::now();
  for (long i = 0; i < request.repeats; ++i) call(request.operation, slots_[i % slots_.size()]);
  return seconds_since(begin);
}

double Cases::copy(const Request& request) {
  const bool apart = slots_.front().input != slots_.front().output;
  if (!apart && copied_ == nullptr) {
    copied_.reset(new float[elements_ * slots_.size()]);
    std::memset(copied_.get(), 0, elements_ * slots_.size() * sizeof(float));
  }
  peer_.barrier();
  const Clock::time_point begin = Clock::now();
  for (long i = 0; i < request.repeats; ++i) {
    const size_t slot = i % slots_.size();
    float* const to = apart ? slots_[slot].input : copied_.get() + slot * elements_;
    std::memcpy(to, slots_[slot].output, elements_ * sizeof(float));
    asm volatile("" : : "r"(to) : "memory");  // a copy that nobody reads is made all the same
  }
  return seconds_since(begin);
}

}  // namespace muster::load
