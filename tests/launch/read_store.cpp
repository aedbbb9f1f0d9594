// Prints one value of the job's store, found as any worker finds it: read_store KEY.

#include <cstdio>

#include "muster/store/store.h"

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const auto deadline = muster::Deadline::after(std::chrono::seconds(100));
  const auto store = muster::store_from_environment(deadline);
  if (!store) return std::fprintf(stderr, "%s\n", store.error().to_string().c_str()), 1;
  const auto value = (*store)->get(argv[1], deadline);
  if (!value) return std::fprintf(stderr, "%s\n", value.error().to_string().c_str()), 1;
  return std::printf("%s\n", muster::to_string(*value).c_str()) > 0 ? 0 : 1;
}
