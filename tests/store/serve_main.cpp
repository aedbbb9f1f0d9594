// A store server for tests in Python and for store_process.h (--alone). It prints the port for PyTorch's clients. Then
// it serves until its standard input ends. With --proxy it starts a root and a proxy in the same process, and clients
// use the proxy. With --tiered the proxy also merges requests and answers from leases.

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
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

// The arguments after --alone are the secret, the upstream or "", the link grace in ms, and the session in hex or "".
// Prints the address for muster's protocol and the address for PyTorch's protocol.
int serve_alone(const char* const* arguments) {
  StoreServerOptions options;
  options.credentials.secret = to_bytes(arguments[0]);
  options.torch_listen = {*Address::parse("127.0.0.1:0")};
  options.muster_listen = {*Address::parse("127.0.0.1:0")};
  options.upstream = arguments[1];
  options.tiered = true;
  options.link_grace = std::chrono::milliseconds(std::strtol(arguments[2], nullptr, 10));
  if (const auto session = from_hex(arguments[3]); session && !session->empty()) {
    std::copy(session->begin(), session->end(), options.session.emplace().begin());
  }
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
  const std::string_view mode = argc > 1 ? argv[1] : "";
  if (mode == "--alone" && argc == 6) return muster::serve_alone(argv + 2);
  return muster::serve(mode == "--proxy" || mode == "--tiered", mode == "--tiered");
}
