#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace muster {

/// Where in the user's program a call was made, as a number: small, dense and the same for as long as the process
/// lives. Zero: not known.
using CallSite = uint32_t;

/// Interning gives one number for each text ("train.py:71"); once there are kMaxCallSites it gives zero. Thread-safe.
inline constexpr CallSite kMaxCallSites = 4095;
CallSite intern_call_site(std::string_view text);
/// What was interned; empty for zero.
std::string call_site_text(CallSite site);

/// Finds the call site of the calling thread, in some nanoseconds and without blocking. Set once by whoever knows the
/// language that calls: the Python binding. Thread-safe.
using CallSiteProbe = CallSite (*)();
void set_call_site_probe(CallSiteProbe probe);
/// The probe's answer; zero without one.
CallSite current_call_site();

}  // namespace muster
