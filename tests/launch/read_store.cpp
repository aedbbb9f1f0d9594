// Prints one value of the job's store: read_store KEY. Unlike store_from_environment(), it also sees the agents' keys.

#include <cstdio>
#include <cstdlib>

#include "muster/store/store.h"

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const auto deadline = muster::Deadline::after(std::chrono::seconds(100));
  const char* url = std::getenv("MUSTER_STORE");
  const char* secret = std::getenv("MUSTER_SECRET");
  if (url == nullptr || secret == nullptr) return 2;
  const auto store = muster::open_store(url, muster::from_hex(secret).value_or(muster::Bytes{}), deadline);
  if (!store) return std::fprintf(stderr, "%s\n", store.error().to_string().c_str()), 1;
  const auto value = (*store)->get(argv[1], deadline);
  if (!value) return std::fprintf(stderr, "%s\n", value.error().to_string().c_str()), 1;
  return std::printf("%s\n", muster::to_string(*value).c_str()) > 0 ? 0 : 1;
}
