// Operators of torch in C++, which a worker in Python offers to others: examples/python/counters.py.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <mutex>
#include <string>
#include <unordered_map>

namespace {

std::mutex mutex;
std::unordered_map<std::string, at::Tensor> counters;

/// Adds to the counter with this name, and returns the sum so far.
at::Tensor add(const std::string& name, const at::Tensor& amounts, double weight) {
  const std::lock_guard lock(mutex);
  at::Tensor& counter = counters[name];
  counter = counter.defined() ? counter + amounts * weight : amounts * weight;
  return counter;
}

}  // namespace

TORCH_LIBRARY(counters, library) { library.def("add(str name, Tensor amounts, float weight=1.0) -> Tensor", add); }
