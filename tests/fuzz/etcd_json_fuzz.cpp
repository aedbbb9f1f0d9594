// Answers of an etcd server. Any JSON must be parsed without a crash, and missing fields must read as empty.

#include "muster/base/check.h"
#include "muster/store/etcd/etcd_client.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto* text = reinterpret_cast<const char*>(data);
  const muster::etcd::Json json = muster::etcd::Json::parse(text, text + size, nullptr, false);
  size_t bytes = 0;
  for (const auto& key : muster::etcd::keys_of(json)) bytes += key.key.size() + key.value.size();
  MUSTER_CHECK(bytes <= size, "more came out than went in");
  for (size_t i = 0; i < 3; ++i) (void)muster::etcd::key_of(muster::etcd::response(json, i, "response_range"));
  (void)muster::etcd::revision(json);
  (void)muster::etcd::text(json, "error");
  (void)muster::etcd::number(json, "count");
  return 0;
}
