#include "muster/flight/call_site.h"

#include <atomic>
#include <deque>
#include <mutex>
#include <unordered_map>

#include "muster/base/at_fork.h"

namespace muster {
namespace {

/// One table for the process, because call sites outlive every group, and a caller that asks for one has no group yet.
struct Table {
  std::mutex mutex;
  std::deque<std::string> texts;  ///< by number - 1; a deque, because `numbers` refers to the texts
  std::unordered_map<std::string_view, CallSite> numbers;
  const AtFork at_fork = hold_over_fork(mutex);
};

Table& table() {
  static Table& the_table = *new Table;  // never destroyed: threads may still use it when the program ends
  return the_table;
}

/// set_call_site_probe() stores it with release, and current_call_site() loads it with acquire. So a thread that calls
/// the probe sees what was written before the probe was set.
std::atomic<CallSiteProbe> the_probe = nullptr;

}  // namespace

CallSite intern_call_site(std::string_view text) {
  Table& sites = table();
  const std::lock_guard lock(sites.mutex);
  if (const auto known = sites.numbers.find(text); known != sites.numbers.end()) return known->second;
  if (text.empty() || sites.texts.size() >= kMaxCallSites) return 0;
  sites.texts.emplace_back(text);
  const auto number = static_cast<CallSite>(sites.texts.size());
  sites.numbers.emplace(sites.texts.back(), number);
  return number;
}

std::string call_site_text(CallSite site) {
  Table& sites = table();
  const std::lock_guard lock(sites.mutex);
  return site > 0 && site <= sites.texts.size() ? sites.texts[site - 1] : "";
}

void set_call_site_probe(CallSiteProbe probe) { the_probe.store(probe, std::memory_order_release); }

CallSite current_call_site() {
  const CallSiteProbe probe = the_probe.load(std::memory_order_acquire);
  return probe != nullptr ? probe() : 0;
}

}  // namespace muster
