// A store server for tests in other languages: prints the port of its torch dialect, then serves until its standard
// input ends. With an argument it is a proxy of a root in the same process, so that requests take the longer way.

#include <unistd.h>

#include <cstdio>
#include <string_view>

#include "muster/store/server.h"

namespace muster {
namespace {

int serve(bool through_proxy) {
  const Deadline deadline = Deadline::after(30s);
  StoreServerOptions options;
  options.torch_listen = {*Address::parse("127.0.0.1:0")};
  options.muster_listen = {*Address::parse("127.0.0.1:0")};
  const auto root = StoreServer::start(options, deadline);
  if (!root) return std::fprintf(stderr, "%s\n", root.error().to_string().c_str()), 1;
  const StoreServer* asked = root->get();
  Result<std::unique_ptr<StoreServer>> proxy;
  if (through_proxy) {
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

int main(int argc, char** argv) { return muster::serve(argc > 1 && std::string_view(argv[1]) == "--proxy"); }
