#include "muster/rpc/function_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

namespace muster::rpc {
namespace {

/// The most names that an error lists.
constexpr size_t kMaxListed = 8;

}  // namespace

Result<> FunctionTable::add(const std::string& name, Handler handler, FunctionOptions options) {
  const std::lock_guard lock(mutex_);
  auto function = std::make_shared<const Function>(Function{std::move(handler), options});
  if (functions_.try_emplace(name, std::move(function)).second) return {};
  return fail(ErrorCode::kAlreadyExists, fmt::format("a function named \"{}\" was added already", name));
}

Result<> FunctionTable::add_fallback(Handler handler) {
  const std::lock_guard lock(mutex_);
  if (fallback_) return fail(ErrorCode::kAlreadyExists, "a fallback was added already");
  fallback_ = std::make_shared<const Function>(Function{std::move(handler), {}});
  return {};
}

FunctionTable::FunctionPtr FunctionTable::find(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto found = functions_.find(name);
  return found == functions_.end() ? fallback_ : found->second;
}

bool FunctionTable::is_idempotent(const std::string& name) const {
  const FunctionPtr function = find(name);
  return function && function->options.idempotent;
}

void FunctionTable::run(Request request, Responder responder) const {
  if (const FunctionPtr function = find(request.function)) {
    return function->handler(std::move(request), std::move(responder));
  }
  responder.fail(CallError{
      {ErrorCode::kNotFound, fmt::format("there is no function \"{}\" ({})", request.function, names())}, {}, {}});
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
