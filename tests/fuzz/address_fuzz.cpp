// Addresses as text. An address that is parsed must give the same address after it is written and parsed again.
#include "muster/base/check.h"
#include "muster/io/address.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  if (const auto address = muster::Address::parse(text)) {
    const auto again = muster::Address::parse(address->to_string());
    MUSTER_CHECK(again && *again == *address, "an address is not read as it was written: " + address->to_string());
    MUSTER_CHECK(address->with_port(7).port() == (address->is_unix() ? 0 : 7), "with_port() lost the port");
  }
  if (const auto split = muster::parse_host_port(text, 1)) MUSTER_CHECK(!split->host.empty(), "a host without a name");
  return 0;
}
