#include "muster/rpc/function_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

namespace muster::rpc {
namespace {

/// The most names that an error lists.
constexpr size_t kMaxListed = 8;

}  // namespace

std::string_view name_without_note(std::string_view called) { return called.substr(0, called.find(kNote)); }

std::string_view shown_name(std::string_view called) {
  const size_t note = called.find(kNote);
  return note == std::string_view::npos || note + 1 == called.size() ? called.substr(0, note) : called.substr(note + 1);
}

Result<> FunctionTable::add(const std::string& name, Handler handler, FunctionOptions options) {
  if (name.find(kNote) != std::string::npos) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("the name of a function must not contain {}: \"{}\"", kNote, name));
  }
  const std::lock_guard lock(mutex_);
  auto function = std::make_shared<const Function>(std::move(handler), options);
  if (functions_.try_emplace(name, std::move(function)).second) return {};
  return fail(ErrorCode::kAlreadyExists, fmt::format("a function named \"{}\" was added already", name));
}

Result<> FunctionTable::add_fallback(Handler handler, FunctionOptions options) {
  const std::lock_guard lock(mutex_);
  if (fallback_) return fail(ErrorCode::kAlreadyExists, "a fallback was added already");
  fallback_ = std::make_shared<const Function>(std::move(handler), options);
  return {};
}

FunctionTable::FunctionPtr FunctionTable::find(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto found = functions_.find(name);
  return found == functions_.end() ? fallback_ : found->second;
}

FunctionOptions FunctionTable::options_of(std::string_view called) const {
  const FunctionPtr function = find(std::string(name_without_note(called)));
  return function ? function->options : FunctionOptions();
}

void FunctionTable::run(Request request, Responder responder) const {
  request.function.resize(name_without_note(request.function).size());
  if (const FunctionPtr function = find(request.function)) {
    function->running.fetch_add(1, std::memory_order_relaxed);
    function->handler(std::move(request), std::move(responder));
    function->running.fetch_sub(1, std::memory_order_relaxed);
    return;
  }
  responder.fail(CallError{
      {ErrorCode::kNotFound, fmt::format("there is no function \"{}\" ({})", request.function, names())}, {}, {}});
}

std::string FunctionTable::running() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> all;
  for (const auto& [name, function] : functions_) {
    if (function->running.load(std::memory_order_relaxed) > 0) all.push_back(fmt::format("\"{}\"", name));
  }
  if (fallback_ && fallback_->running.load(std::memory_order_relaxed) > 0) all.emplace_back("the fallback");
  std::ranges::sort(all);
  return fmt::format("{}", fmt::join(all, ", "));
}

std::string FunctionTable::names() const {
  std::vector<std::string> all;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, function] : functions_) all.push_back(name);
  }
  if (all.empty()) return "no function was added";
  std::ranges::sort(all);
  const size_t rest = all.size() - std::min(all.size(), kMaxListed);
  all.resize(all.size() - rest);
  return fmt::format("there are: {}{}", fmt::join(all, ", "), rest > 0 ? fmt::format(" and {} more", rest) : "");
}

}  // namespace muster::rpc
