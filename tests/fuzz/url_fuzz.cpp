// URLs of stores. Any text must give a URL or an error, and the displayed form must not contain a password.

#include "muster/base/check.h"
#include "muster/store/url.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const auto url = muster::Url::parse(text, 1);
  const std::string shown = muster::without_password(text);
  MUSTER_CHECK(url || !url.error().message.empty(), "an error without a message");
  if (!url || url->password.size() < 4 || text.find_first_of("%*") != std::string::npos) return 0;
  const auto count = [&](const std::string& in) {
    size_t found = 0;
    for (size_t at = 0; (at = in.find(url->password, at)) != std::string::npos; ++at) ++found;
    return found;
  };
  MUSTER_CHECK(count(shown) < count(text), "the password is still shown where it was");
  return 0;
}
