// A store server for tests in other languages: prints the port of its torch dialect, then serves until its standard
// input ends. With --proxy it is a proxy of a root in the same process, so that requests take the longer way, with
// --tiered one that merges, and answers from leases. --alone is for store_process.h.

#include <unistd.h>

#include <cstdio>
#include <string_view>

#include "muster/store/server/server.h"

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

// The root, or a proxy of `upstream`. Prints its addresses: muster's dialect, torch's.
int serve_alone(std::string_view secret, const std::string& upstream) {
  StoreServerOptions options;
  options.credentials.secret = to_bytes(secret);
  options.torch_listen = {*Address::parse("127.0.0.1:0")};
  options.muster_listen = {*Address::parse("127.0.0.1:0")};
  options.upstream = upstream;
  options.tiered = true;
  options.link_grace = 5s;
  const auto server = StoreServer::start(options, Deadline::after(30s));
  if (!server) return std::fprintf(stderr, "%s\n", server.error().to_string().c_str()), 1;
  std::printf("%s %s\n", (*server)->muster_addresses()[0].to_string().c_str(),
              (*server)->torch_addresses()[0].to_string().c_str());
  std::fflush(stdout);
  char byte;
  while (read(STDIN_FILENO, &byte, 1) > 0) continue;
  return 0;
}

}  // namespace
}  // namespace muster

int main(int argc, char** argv) {
  const std::string_view how = argc > 1 ? argv[1] : "";
  if (how == "--alone") return muster::serve_alone(argc > 2 ? argv[2] : "", argc > 3 ? argv[3] : "");
  return muster::serve(how == "--proxy" || how == "--tiered", how == "--tiered");
}
