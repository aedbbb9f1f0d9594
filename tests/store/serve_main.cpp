// A store server for tests in other languages: prints the port of its torch dialect, then serves until its standard
// input ends. With --proxy it is a proxy of a root in the same process, so that requests take the longer way, with
// --tiered one that merges, and answers from leases.

#include <unistd.h>

#include <cstdio>
#include <string_view>

#include "muster/store/server.h"

namespace muster {
namespace {

int serve(bool through_proxy, bool tiered) {
  const Deadline deadline = Deadline::after(30s);
  StoreServerOptions options;
  options.torch_listen = {*Address::parse("127.0.0.1:0")};
  options.muster_listen = {*Address::parse("127.0.0.1:0")};
  const auto root = StoreServer::start(options, deadline);
  if (!root) return std::fprintf(stderr, "%s\n", root.error().to_string().c_str()), 1;
  const StoreServer* asked = root->get();
  Result<std::unique_ptr<StoreServer>> proxy;
  if (through_proxy) {
    options.tiered = tiered;
    options.upstream = "tcp://" + (*root)->muster_addresses()[0].to_string();
    proxy = StoreServer::start(options, deadline);
    if (!proxy) return std::fprintf(stderr, "%s\n", proxy.error().to_string().c_str()), 1;
    asked = proxy->get();
  }
  std::printf("%d\n", int{asked->torch_addresses()[0].port()});
  std::fflush(stdout);
  char byte;
  while (read(STDIN_FILENO, &byte, 1) > 0) continue;
  return 0;
}

}  // namespace
}  // namespace muster

int main(int argc, char** argv) {
  const std::string_view how = argc > 1 ? argv[1] : "";
  return muster::serve(how == "--proxy" || how == "--tiered", how == "--tiered");
}
