// Compiles the functions of fmt once. With fmt's header-only form, each file that formats would compile its own copies
// (a quarter of the core's build). With fmt's library, every user of muster would need that library. This file supports
// fmt 8 to 12. A version that needs more functions takes them from its library: the build links the library too, and
// the linker drops it if no function is missing.

#include <fmt/format-inl.h>

FMT_BEGIN_NAMESPACE
namespace detail {

template auto thousands_sep_impl(locale_ref) -> thousands_sep_result<char>;
template auto decimal_point_impl(locale_ref) -> char;
#if FMT_VERSION >= 90000
template auto dragonbox::to_decimal(float) noexcept -> dragonbox::decimal_fp<float>;
template auto dragonbox::to_decimal(double) noexcept -> dragonbox::decimal_fp<double>;
#else
template int snprintf_float(double, int, float_specs, buffer<char>&);
template int snprintf_float(long double, int, float_specs, buffer<char>&);
template int format_float(double, int, float_specs, buffer<char>&);
template int format_float(long double, int, float_specs, buffer<char>&);
#endif
#if FMT_VERSION >= 100000 && FMT_VERSION < 110000
template void vformat_to(buffer<char>&, string_view, vformat_args<>::type, locale_ref);
#endif

}  // namespace detail
FMT_END_NAMESPACE
