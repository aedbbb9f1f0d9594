#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace muster {

/// A place in the user's program that made a call, as a small number. It stays the same for the life of the process.
/// Zero: unknown.
using CallSite = uint32_t;

/// The number of a text ("train.py:71"). Zero for further texts once there are kMaxCallSites. Thread-safe.
inline constexpr CallSite kMaxCallSites = 4095;
CallSite intern_call_site(std::string_view text);
/// The text of a number; empty for zero.
std::string call_site_text(CallSite site);

/// Finds the call site of the calling thread in some nanoseconds, without blocking. The Python binding sets it once.
/// Thread-safe.
using CallSiteProbe = CallSite (*)();
void set_call_site_probe(CallSiteProbe probe);
/// The result of the probe; zero if there is no probe.
CallSite current_call_site();

}  // namespace muster
